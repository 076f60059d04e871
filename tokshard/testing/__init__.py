"""For your tests: what stops and resumes reads on as if it had not, and a source of your own keeps its word."""

from tokshard.testing.resume import Job, Loader, MakeLoader, assert_exact_resume
from tokshard.testing.sources import assert_token_source

__all__ = ["Job", "Loader", "MakeLoader", "assert_exact_resume", "assert_token_source"]
