"""Builds on a real Ray cluster of three nodes on this machine: nodes that cannot take part, buckets, and losses.

That a cluster makes the bytes of one process, also when its driver is killed, is in the table of promise 1.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.contract import builds
from tests.contract.conversations import conversations, write_tokenizer
from tests.pipeline.places import files
from tests.store.faulty_proxy import FaultyProxy, status
from tokshard import build_corpus
from tokshard.errors import BuildError, UsageError
from tokshard.format import names
from tokshard.pipeline import request, resolve
from tokshard.store import files_below, open_store

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
RECEIPTS = f"{names.WORK}/write/receipts/*.receipt"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Three nodes with one CPU each."""
    from ray.cluster_utils import Cluster

    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    for _ in range(2):
        nodes.add_node(num_cpus=1)
    yield nodes
    nodes.shutdown()


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Plain and compressed lines, a few tasks of each."""
    return [*map(Path, builds.write_sources(tmp_path_factory.mktemp("sources"), documents=4000))]


@pytest.fixture(scope="module")
def long_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Enough text for dozens of tasks."""
    line = json.dumps({"text": "The quick brown fox jumps over the lazy dog. " * 60}) + "\n"
    path = tmp_path_factory.mktemp("long") / "long.jsonl"
    path.write_text(line * ((48 << 20) // len(line)))
    return path


def options(out: Path, **more: Any) -> dict[str, Any]:
    return {"tokenizer": builds.TOKENIZER, "out": out, "task_bytes": 1 << 20, "shard_tokens": 100_000, **more}


@contextlib.contextmanager
def connected(cluster: Any, variables: dict[str, str] | None = None) -> Iterator[Any]:
    """This program, connected to the cluster, whose workers get variables of the environment."""
    import ray

    before, handler = dict(os.environ), signal.getsignal(signal.SIGTERM)
    ray.init(
        address=cluster.address,
        log_to_driver=False,
        logging_level="ERROR",
        runtime_env={"env_vars": variables or {}},
    )
    try:
        yield ray
    finally:
        ray.shutdown()
        os.environ.clear()
        os.environ.update(before)
        signal.signal(signal.SIGTERM, handler)


BOTH: dict[str, Any] = {"dedup": "exact", "validation_fraction": 0.1}


@pytest.mark.parametrize("more", [{}, {"dedup": "exact"}, {"max_documents": 700}])
def test_nodes_read_what_only_the_driver_can_read(more, cluster, tmp_path):
    records = [{"text": f"{number % 900} {'text ' * 500}"} for number in range(1_000)]
    for name, how in (("local", {"workers": 2}), ("ray", {"ray": cluster.address})):
        build_corpus([iter(records), iter(["one", "two"])], **options(tmp_path / name, **how), **more)
    assert files(tmp_path / "ray") == files(tmp_path / "local")


def test_conversations_become_the_documents_of_a_local_build(cluster, tmp_path):
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    for number in range(4):
        records = [json.dumps(record) + "\n" for record in conversations(1_500, seed=number % 3)]
        (tmp_path / f"{number}.jsonl").write_text("".join(records))
    given = sorted(tmp_path.glob("*.jsonl"))
    for name, how in (("local", {"workers": 2}), ("ray", {"ray": cluster.address})):
        build_corpus(given, **options(tmp_path / name, **how) | {"tokenizer": tokenizer}, chat="own", **BOTH)
    assert files(tmp_path / "ray") == files(tmp_path / "local")


def test_a_program_keeps_its_connection_environment_and_handlers(cluster, sources, tmp_path):
    import ray

    before, handler = dict(os.environ), signal.getsignal(signal.SIGTERM)
    given = [sources[2]]
    build_corpus(given, **options(tmp_path / "one", ray=cluster.address))
    assert not ray.is_initialized()
    assert (dict(os.environ), signal.getsignal(signal.SIGTERM)) == (before, handler)
    with connected(cluster):
        build_corpus(given, **options(tmp_path / "two", ray="auto"))
        assert ray.is_initialized()
        with pytest.raises(UsageError, match=r"this program has called ray\.init already"):
            build_corpus(given, **options(tmp_path / "three", ray="local"))
    assert files(tmp_path / "one") == files(tmp_path / "two")


NOBODY = r"Ray cannot be reached at --ray .*Connection refused"


@pytest.mark.parametrize(
    ("given", "variable", "problem", "hint"),
    [
        ("ray://127.0.0.1:1", "", r"Ray Client \(ray://\)", "ray job submit"),
        ("127.0.0.1:9", "", NOBODY, ""),
        ("auto", "127.0.0.1:9", NOBODY, ""),
    ],
)
def test_an_address_without_a_cluster_is_refused_within_seconds(
    given, variable, problem, hint, sources, tmp_path, monkeypatch
):
    began = time.monotonic()
    monkeypatch.setenv("RAY_ADDRESS", variable)
    with pytest.raises(UsageError, match=problem) as caught:
        build_corpus([sources[2]], **options(tmp_path / "out", ray=given))
    assert hint in caught.value.hint
    assert time.monotonic() - began < 30
    assert not (tmp_path / "out" / names.WORK / "receipts").exists()


# nodes that cannot take part


@contextlib.contextmanager
def node_of_its_own(cluster: Any, hidden: Path) -> Iterator[None]:
    """A fourth node, to which a folder looks empty."""
    mounted = f"mount -t tmpfs none {hidden} && exec {sys.executable} -m ray.scripts.scripts start"
    command = f"{mounted} --address {cluster.address} --num-cpus 1 --node-name elsewhere --disable-usage-stats --block"
    node = subprocess.Popen(
        ["unshare", "--mount", "sh", "-c", command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert node.stdout is not None
    try:
        said = []
        while "Ray runtime started" not in (line := node.stdout.readline()):
            said.append(line)
            if node.poll() is not None:
                pytest.skip(f"no mount namespace here: {''.join(said)[-300:]}")
        yield
    finally:
        below = [*psutil.Process(node.pid).children(recursive=True), psutil.Process(node.pid)]
        for process in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(below, timeout=10)
        node.stdout.close()
        node.wait()
        _wait_for(lambda: _alive(cluster) == 3)


def _alive(cluster: Any) -> int:
    with connected(cluster) as ray:
        return sum(node["Alive"] for node in ray.nodes())


@pytest.mark.parametrize("what", ["out", "sources"])
def test_a_node_without_the_output_or_the_sources_is_named_at_the_start(what, cluster, sources, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    moved = folder / "a.jsonl"
    moved.write_bytes(sources[2].read_bytes())
    out = folder / "out" if what == "out" else tmp_path / "out"
    given = [sources[2] if what == "out" else moved]
    with node_of_its_own(cluster, folder):
        with pytest.raises(BuildError) as caught:
            build_corpus(given, **options(out, ray=cluster.address))
        assert not list(out.glob(RECEIPTS))
    expected = f"does not have the files of --out {out}" if what == "out" else f"cannot take part: {moved} cannot be"
    assert caught.value.problem.startswith("node ")
    assert expected in caught.value.problem
    assert "on a file system that all nodes have at the same path" in caught.value.hint
    build_corpus(given, **options(out, ray=cluster.address))


def test_a_node_with_other_versions_is_refused(cluster, sources, tmp_path, monkeypatch):
    here = request.versions_here("text")
    monkeypatch.setattr(resolve, "versions_here", lambda _: {**here, "tokenizers": "0.0.1"})
    other = rf"tokenizers was 0.0.1 when the build began, and is {here['tokenizers']} here"
    with pytest.raises(BuildError, match=rf"node .* has other packages: {other}"):
        build_corpus([sources[2]], **options(tmp_path / "out", ray=cluster.address))


# buckets


def credentials() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("AWS_")}


def content(location: str) -> dict[str, bytes]:
    store = open_store(location)
    return {name: store.get(name) for name in files_below(store, "") if not name.endswith(names.REPORT)}


@pytest.mark.parametrize("is_source_remote", [False, True])
def test_a_build_into_a_bucket_gives_the_bytes_of_a_local_one(is_source_remote, cluster, s3, sources, tmp_path):
    raw = sources[0].parent
    remote = f"{s3}/{raw.name}"  # manifests have the name
    for source in sources:
        open_store(remote).put(source.name, source.read_bytes())
    build_corpus(raw, **options(tmp_path / "out", workers=2), **BOTH)
    with connected(cluster, credentials()):
        build_corpus(remote if is_source_remote else raw, **options(f"{s3}/out", ray="auto"), **BOTH)
    assert content(f"{s3}/out") == content(tmp_path / "out")


def test_a_node_that_the_bucket_refuses_is_named_at_the_start(cluster, s3, s3_port, sources):
    refusing = FaultyProxy(("127.0.0.1", s3_port), for_ever=status(403, "InvalidAccessKeyId"))
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(refusing.running()).port
        stack.enter_context(connected(cluster, {**credentials(), "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}))
        with pytest.raises(BuildError, match=r"^node .* cannot take part: s3://.* access denied: 403") as caught:
            build_corpus([sources[2]], **options(f"{s3}/out", ray="auto"))
    assert "AWS_ACCESS_KEY_ID" in caught.value.hint
    assert "the env_vars of Ray's runtime environment" in caught.value.hint
    assert not [name for name in files_below(open_store(f"{s3}/out"), "") if "receipts" in name]


# losses and stops


class Running:
    """A build of the long source as a process of its own."""

    def __init__(self, cluster: Any, source: Path, out: Path) -> None:
        self.out = out
        arguments = builds.command([str(source)], out, "--ray", cluster.address)
        self.process = subprocess.Popen(
            arguments,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            start_new_session=True,
        )

    def wait_until_under_way(self) -> None:
        _wait_for(lambda: self.process.poll() is not None or len(self.receipts()) >= 3)
        assert self.process.poll() is None, self.end()

    def receipts(self) -> list[Path]:
        return list(self.out.glob(RECEIPTS))

    def end(self) -> tuple[int, str]:
        """Exit code and what it printed."""
        _, errors = self.process.communicate(timeout=200)
        return self.process.returncode, errors


def _wait_for(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.05)


def _busy_workers() -> list[psutil.Process]:
    found = psutil.process_iter(["cmdline"])
    return [process for process in found if "ray::run_task" in (process.info["cmdline"] or [])[:1]]


@pytest.fixture(scope="module")
def expected(long_source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    out = tmp_path_factory.mktemp("expected") / "out"
    build_corpus([long_source], **options(out, workers=2))
    return files(out)


@pytest.fixture
def running(cluster: Any, long_source: Path, tmp_path: Path) -> Iterator[Running]:
    build = Running(cluster, long_source, tmp_path / "out")
    try:
        build.wait_until_under_way()
        yield build
    finally:
        build.process.kill()
        build.process.communicate()


@pytest.mark.parametrize("lost", ["a worker", "a node"])
def test_what_goes_costs_nothing_but_time(lost, cluster, running, expected):
    if lost == "a worker":
        _wait_for(lambda: bool(_busy_workers()))
        _busy_workers()[0].kill()
    else:
        cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
    try:
        assert running.end() == (0, "")
    finally:
        if lost == "a node":
            cluster.add_node(num_cpus=1)
    assert files(running.out) == expected


@pytest.mark.parametrize(
    ("number", "code", "word"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
def test_a_build_that_is_stopped_continues(number, code, word, cluster, running, long_source, expected):
    if number == signal.SIGINT:
        os.killpg(running.process.pid, number)  # as a terminal does
    else:
        running.process.send_signal(number)
    assert running.end() == (code, f"{word}\nhint: run the same command to continue\n")
    assert not _busy_workers()
    assert running.receipts()
    result = build_corpus([long_source], **options(running.out, ray=cluster.address))
    assert 0 < result.tokens_written < result.manifest.num_tokens  # what was done before is kept
    assert files(running.out) == expected


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_ctrl_c_while_ray_starts_interrupts_this_process_when_it_has_and_no_child():
    from tokshard.pipeline.executors.ray_cluster import interrupted_at_end

    reached = False
    with pytest.raises(KeyboardInterrupt), interrupted_at_end():  # noqa: PT012 -- it is raised by the end of the context
        child = os.fork()
        if not child:
            signal.raise_signal(signal.SIGINT)
            os._exit(3)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        signal.raise_signal(signal.SIGINT)
        reached = True
    assert reached
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(KeyboardInterrupt), interrupted_at_end():  # noqa: PT012 -- the second call raises
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        pytest.fail("a second one does not wait")
