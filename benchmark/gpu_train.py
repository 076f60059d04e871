"""The trainer with initial values drawn on the device.

    python -m benchmark.gpu_train RECIPE.toml section.key=value ...

The trainer draws them on the host, one tensor after another, which takes about a minute for 7B. Speed and memory of the
steps do not depend on them.
"""

from __future__ import annotations

import sys
from unittest.mock import patch

import torch
from torch.distributed.tensor import DTensor

from tokshard.trainer import __main__ as command
from tokshard.trainer.model import Transformer


@torch.no_grad()
def initialise_on_device(model: Transformer, *, seed: int) -> None:
    """As the trainer does, but for other values."""
    torch.manual_seed(seed)
    for parameter in model.parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if local.ndim < 2:
            local.fill_(1.0)
        else:
            local.normal_(std=0.02)


if __name__ == "__main__":
    with patch("tokshard.trainer.loop.initialise", initialise_on_device):
        sys.exit(command.main(sys.argv[1:]))
