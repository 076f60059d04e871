"""How fast loaders read from an S3 server that is 20 ms away, and how many bytes they ask for."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmark.peers.distant import Line, seaweedfs
from benchmark.peers.environments import MissingError
from benchmark.peers.frame import Found, Frame, Row, Section, log
from benchmark.peers.loading import ROWS, SEQ_LEN, VOCAB_SIZE, random_tokens

MILLISECONDS = 20
QUICK_TIMEOUT = 10
"""Seconds that MosaicML streaming waits for an answer in the quick form; its default is 60."""

BUCKET, KEY, SECRET = "bucket", "test", "the-secret"  # as the server of tests/store is configured
PEERS = ("tokshard_loading", "streaming_loading", "litdata_loading")
READERS: dict[tuple[str, str], dict[str, Any]] = {
    ("tokshard_loading", "tokshard full"): {"mode": "full"},  # a thread of its reads ahead: it has no workers
    ("tokshard_loading", "tokshard compact"): {"mode": "compact"},
    ("streaming_loading", "MosaicML streaming"): {"workers": 0},
    ("streaming_loading", "MosaicML streaming, 2 workers"): {"workers": 2},
    ("litdata_loading", "litdata"): {"workers": 0},
    ("litdata_loading", "litdata, 2 workers"): {"workers": 2},
}
"""The program of each row, its label, and the settings that the program gets."""

TIMEOUT = (
    "Workers of MosaicML streaming are forks, which share the connection that fetched the index. When two of them use"
    " it at once, answers are lost: a worker asks again, sometimes only after its `download_timeout`."
)


def run(frame: Frame) -> Section:
    num_tokens = (1 << 23) if frame.quick else (1 << 27)
    found: dict[tuple[str, str], list[Found]] = {key: [] for key in READERS}
    try:
        python = frame.environments.python("seaweedfs")
    except MissingError as error:
        found = {key: [{"cannot": str(error)}] for key in READERS}
    else:
        with seaweedfs(python) as port:
            _read(frame, port, num_tokens, found)
    timeout = f" That is {QUICK_TIMEOUT} s in this quick form, and 60 s by default." if frame.quick else ""
    return Section(
        title="From an S3 server",
        paragraphs=[
            (
                "SeaweedFS on this machine, behind a line that passes on what a client sends"
                f" {MILLISECONDS} ms later. The bandwidth is what two cores give. {num_tokens:,} tokens as uint16,"
                f" shuffled, in rows of {SEQ_LEN:,}, {ROWS} rows a batch, one epoch from an empty cache. Bytes per"
                " token: all that the server sent, heads included, for each token that was delivered. tokshard reads"
                " ranges into memory, the others read whole files into a folder. A full batch of tokshard has labels"
                " and positions, too. A compact one has the ids as they are stored, as the others do, and bounds."
            ),
        ],
        columns={
            "tokens_per_second": "tokens/s",
            "first_batch_seconds": "first batch, s",
            "bytes_per_token": "bytes per token",
            "requests": "requests",
            "peak_bytes": "memory, bytes",
        },
        rows=[Row(label=label, runs=runs) for (_, label), runs in found.items()],
        notes=[TIMEOUT + timeout],
        plot="tokens_per_second",
    )


def _read(frame: Frame, port: int, num_tokens: int, found: dict[tuple[str, str], list[Found]]) -> None:
    """Put the data of each peer on the server, and read them in turn."""
    folder = frame.work / "store"
    given: dict[str, Any] = {"tokens": random_tokens(folder, num_tokens), "seq_len": SEQ_LEN, "rows": ROWS}
    given |= {"vocab_size": VOCAB_SIZE, "tokenizer": frame.tokenizer, "file_bytes": (4 if frame.quick else 64) << 20}
    given |= {"tokens_to_read": num_tokens, "seconds": 60, "has_resume": False}
    if frame.quick:
        given["download_timeout"] = QUICK_TIMEOUT
    made = {}
    for peer in PEERS:
        made[peer] = frame.call(peer, "make", given | {"data": folder / peer})
        if "stored_bytes" in made[peer]:
            _upload(folder / peer, peer, port)
    with Line(to_port=port, seconds=MILLISECONDS / 1e3).running() as line, _environment(line.port) as options:
        for _ in range(frame.repeats):
            for (peer, label), runs in found.items():
                if runs and "tokens_per_second" not in runs[-1]:
                    continue
                if "stored_bytes" not in made[peer]:
                    runs.append(made[peer])
                    continue
                uri = f"s3://{BUCKET}/{peer}"
                place = {"data": uri, "remote": uri, "cache": folder / "cache", "storage_options": options}
                (folder / "cache").mkdir(exist_ok=True)
                line.received = line.requests = 0
                said = frame.call(peer, "read", given | place | READERS[peer, label])
                if "tokens_read" in said:
                    said |= {"bytes_per_token": line.received / said["tokens_read"], "requests": line.requests}
                runs.append(said)
                shutil.rmtree(folder / "cache")
                log(f"{label}: {said}")
    shutil.rmtree(folder)


def _upload(folder: Path, prefix: str, port: int) -> None:
    """Without the delay."""
    import boto3

    client = boto3.client(
        "s3",
        endpoint_url=f"http://127.0.0.1:{port}",
        aws_access_key_id=KEY,
        aws_secret_access_key=SECRET,
        region_name="us-east-1",
    )
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            client.upload_file(str(path), BUCKET, f"{prefix}/{path.relative_to(folder)}")


@contextmanager
def _environment(port: int) -> Iterator[dict[str, str]]:
    """The names by which each peer finds the server; gives what litdata takes as options."""
    url = f"http://127.0.0.1:{port}"
    names = {"AWS_ENDPOINT_URL": url, "S3_ENDPOINT_URL": url, "AWS_REGION": "us-east-1"}
    names |= {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_DEFAULT_REGION": "us-east-1"}
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    try:
        yield {"endpoint_url": url, "aws_access_key_id": KEY, "aws_secret_access_key": SECRET}
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
