"""Settings of the whole suite."""

import os

from hypothesis import settings

# the timeout of pytest ends what hangs; a deadline per example only fails on a busy machine
settings.register_profile("dev", deadline=None, max_examples=40)
settings.register_profile("ci", deadline=None, max_examples=200)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))
