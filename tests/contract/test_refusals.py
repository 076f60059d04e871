"""What jobs of an array cannot do, and what a scheduler has to say of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.contract.commands import DEDUP, job_words
from tests.pipeline.inputs import write_byte_tokenizer
from tests.refusals import Refusal, Said, check, refused, tokshard


def build(*words: str) -> Callable[[Path], Said]:
    """A build, with what a scheduler sets before it, as a shell has it."""

    def call(directory: Path) -> Said:
        write(directory)
        with pytest.MonkeyPatch.context() as patch:
            for name, value in (word.split("=") for word in words if word[0] != "-" and "=" in word):
                patch.setenv(name, value)
            said = tokshard(*BUILD, *[word for word in words if "=" not in word])
        assert not (directory / "out").exists()
        return said

    return call


def write(directory: Path) -> None:
    write_byte_tokenizer(directory / "tokenizer")
    (directory / "a.jsonl").write_text('{"text": "a text"}\n')


BUILD = ("build", "a.jsonl", "--tokenizer", "tokenizer", "--out", "out", "-q", "--workers", "1")


def other_settings(directory: Path) -> Said:
    write(directory)
    assert tokshard(*job_words(BUILD, 0, 2)).exit_code == 0
    return tokshard(*job_words((*BUILD, "--min-tokens", "3", *DEDUP), 1, 2))


INDEX_AND_NUMBER = "give --job-index I and --num-jobs N, with I below N"
STARTS_OVER = "--force starts over, and every job of an array would remove what the others have done"
LEAVE_OUT = "leave out --job-index and --num-jobs"
ARRAY = "submit the script as an array, such as sbatch --array=0-15"
HELP = "see 'tokshard build --help'"
SLURM = "--job-index slurm: SLURM_ARRAY_TASK_"
IN_SLURM = "SLURM_ARRAY_TASK_ID=3 SLURM_ARRAY_TASK_MIN=0"

JOBS = {
    "--job-index 2 --num-jobs 2": ("job 2 of 2 does not exist", "give --job-index a number from 0 to 1"),
    "--job-index 0": ("missing option '--num-jobs'", INDEX_AND_NUMBER),
    "--num-jobs 2": ("missing option '--job-index'", INDEX_AND_NUMBER),
    "--job-index 0 --num-jobs 2 --force": (STARTS_OVER, "remove out first"),
    "--job-index 0 --num-jobs 2 --append --force": (STARTS_OVER, LEAVE_OUT),
    "--job-index 0 --num-jobs 2 --dry-run": ("--dry-run cannot be divided among jobs", LEAVE_OUT),
    "--job-index slurm": (
        f"{SLURM}ID is not set, SLURM_ARRAY_TASK_MIN is not set, SLURM_ARRAY_TASK_MAX is not set",
        ARRAY,
    ),
    f"{IN_SLURM} --job-index slurm": (f"{SLURM}MAX is not set", ARRAY),
    f"{IN_SLURM}x SLURM_ARRAY_TASK_MAX=4 --job-index slurm": (f"{SLURM}MIN is '0x'", ARRAY),
    "--job-index slurm --num-jobs 2": (
        "--num-jobs is given, and Slurm says how many jobs its array has",
        "leave it out, or --job-index slurm",
    ),
    "--job-index kubernetes --num-jobs 2": (
        "--job-index kubernetes: JOB_COMPLETION_INDEX is not set",
        "set completionMode: Indexed in the Job",
    ),
    "JOB_COMPLETION_INDEX=0 --job-index kubernetes": (
        "missing option '--num-jobs': Kubernetes does not tell a pod how many there are",
        "give --num-jobs N, where N is the number of completions of the Job",
    ),
    "JOB_COMPLETION_INDEX=2 --job-index kubernetes --num-jobs 2": (
        "job 2 of 2 does not exist",
        "give --job-index a number from 0 to 1",
    ),
    **{
        f"--job-index {index} --num-jobs 2": (
            f"invalid value for '--job-index': '{index}' is not a number from 0 on, slurm or kubernetes",
            HELP,
        )
        for index in ("ray", "-1")
    },
}
"""What is said of a job, with what its scheduler sets."""

REFUSALS = [
    *[Refusal(f"a job: {words}", build(*words.split()), 2, *said) for words, said in JOBS.items()],
    Refusal(
        "a job with other settings than the earlier jobs",
        other_settings,
        2,
        "out belongs to another build: --dedup was none, now exact; --min-tokens was not given, now 3",
        "give the settings of that build, another --out, remove out to start over",
    ),
    Refusal(
        "a commit before any job has run",
        lambda directory: tokshard("commit", directory),
        2,
        "no build has begun in DIR",
        "run the jobs first: tokshard build ... --job-index I --num-jobs N",
    ),
]


@refused(REFUSALS)
def test_refusals(refusal: Refusal, tmp_path: Path) -> None:
    check(refusal, tmp_path)
