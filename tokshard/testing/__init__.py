"""Checks for your tests: a job resumes exactly, and your own `TokenSource` keeps its contract."""

from tokshard.testing.resume import Job, Loader, MakeLoader, assert_exact_resume
from tokshard.testing.sources import assert_token_source

__all__ = ["Job", "Loader", "MakeLoader", "assert_exact_resume", "assert_token_source"]
