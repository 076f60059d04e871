"""The trainer on data that stop coming after some samples, until the file $GATE exists.

python -m tests.trainer.gated RECIPE.toml
"""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from unittest.mock import patch

from tokshard.runtime.plan import StreamPlan
from tokshard.runtime.rows.transforms import Sample, SampleRandom
from tokshard.trainer import __main__ as command

NUM_STEPS = 6
"""Lines of metrics before the gate. More steps are read, but the numbers of a step are written a step later."""
_NUM_SAMPLES = 40  # of a rank: step 9 or 10, where it has 5 or 4 samples of each


class Gate:
    """A transform that changes nothing, and waits."""

    def __init__(self) -> None:
        self.seen = 0

    def __call__(self, sample: Sample, _: SampleRandom) -> Sample:
        self.seen += 1
        while self.seen > _NUM_SAMPLES and not os.path.exists(os.environ["GATE"]):
            time.sleep(0.05)
        return sample


def main() -> int:
    with patch("tokshard.trainer.loop.StreamPlan", partial(StreamPlan, transforms=[Gate()])):
        return command.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
