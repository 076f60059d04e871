"""All text about verifications, for a terminal."""

from __future__ import annotations

from tokshard.inspect.verify.verification import VerifyReport
from tokshard.wording import bytes_text, counted, one_line


def verify_text(report: VerifyReport, seconds: float, *, is_quick: bool) -> str:
    """A line for a corpus without problems, otherwise a line per problem.

    Args:
        seconds: duration of the check.
        is_quick: whether only the structure was checked.
    """
    directory = one_line(report.directory)
    if not report.is_ok:
        lines = [f"damaged: {directory}: {counted(len(report.problems), 'problem')}"]
        return "\n".join(lines + [f"  {one_line(one.file)} {one_line(one.message)}" for one in report.problems])
    counts = [
        counted(report.num_documents, "document"),
        counted(report.num_tokens, "token"),
        counted(report.num_shards, "shard"),
    ]
    verdict = "structure ok" if is_quick else "ok"
    speed = f"{bytes_text(report.checked_bytes)} at {bytes_text(report.checked_bytes / max(seconds, 1e-9))}/s"
    return f"{verdict}: {directory}: {', '.join(counts)}, {speed}"
