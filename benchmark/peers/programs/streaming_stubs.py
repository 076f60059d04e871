"""Names of torchvision, whose builds need CUDA: MosaicML streaming imports it for its data sets of images alone."""

import importlib
import sys
from types import ModuleType
from typing import Any


def imported() -> Any:
    """The package `streaming`."""
    importlib.import_module("transformers.feature_extraction_utils")  # asks for torchvision, too, but can do without
    for name in ("torchvision", "torchvision.datasets", "torchvision.transforms", "torchvision.transforms.functional"):
        sys.modules[name] = ModuleType(name)
    sys.modules["torchvision.datasets"].VisionDataset = object  # type: ignore[attr-defined]
    sys.modules["torchvision.transforms.functional"].to_tensor = None  # type: ignore[attr-defined]
    return importlib.import_module("streaming")
