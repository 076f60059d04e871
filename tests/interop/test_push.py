"""A pushed export arrives whole in the hub, as one commit; what stands in its way is found before the export."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.corpora import TINY_TOKENIZER, documents_of, write_corpus
from tokshard.cli.main import run


@dataclass
class Hub:
    """Data sets, each a path to content, and whether it is private."""

    address: str = ""
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    is_private: dict[str, bool] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)
    refuses: bool = False


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The few answers of the hub that an upload needs. Files are small, so they come inside of the commit."""
    state = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(*_got(state, self.path))

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self._answer(*_posted(state, self.path, body))

        def _answer(self, status: int, content: Any) -> None:
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            if status == 404:
                self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    state.address = f"http://127.0.0.1:{server.server_port}"
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "ENDPOINT", state.address)  # what HF_ENDPOINT says when the package is imported
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    yield state
    server.shutdown()
    server.server_close()
    thread.join()


def _got(state: Hub, path: str) -> tuple[int, Any]:
    path = path.partition("?")[0]
    if path == "/api/whoami-v2":
        return (401, {"error": "no such token"}) if state.refuses else (200, {"name": "me", "type": "user", "orgs": []})
    name = "/".join(path.removeprefix("/api/datasets/").split("/")[:2])
    if name not in state.files:
        return 404, {"error": "not found"}
    if "/tree/" in path:
        return 200, [
            {"type": "file", "path": file, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
            for file, content in state.files[name].items()
        ]
    siblings = [{"rfilename": file} for file in state.files[name]]
    return 200, {"_id": "0", "id": name, "sha": "0" * 40, "private": state.is_private[name], "siblings": siblings}


def _posted(state: Hub, path: str, body: bytes) -> tuple[int, Any]:
    path = path.partition("?")[0]
    if path == "/api/repos/create":
        asked = json.loads(body)
        name = "/".join(part for part in (asked.get("organization") or "me", asked["name"]) if part)
        if name in state.files:
            return 409, {"error": "exists", "url": f"{state.address}/datasets/{name}"}
        state.files[name] = {}
        state.is_private[name] = bool(asked.get("private")) or asked.get("visibility") == "private"
        return 200, {"url": f"{state.address}/datasets/{name}", "name": name, "id": "0"}
    if path == "/api/validate-yaml":
        return 200, {"errors": [], "warnings": []}
    name = "/".join(path.removeprefix("/api/datasets/").split("/")[:2])
    if "/preupload/" in path:
        return 200, {
            "files": [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in json.loads(body)["files"]
            ]
        }
    assert "/commit/" in path
    for line in body.splitlines():
        entry = json.loads(line)
        if entry["key"] == "file":
            state.files[name][entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
    state.commits.append(name)
    return 200, {"commitUrl": f"{state.address}/datasets/{name}/commit/1", "commitOid": "1" * 40, "success": True}


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "corpus", documents_of([5, 300, 2]), tokenizer=TINY_TOKENIZER)


def push(corpus: Path, out: Path, *options: str) -> int:
    return run(["export", str(corpus), "--format", "hf", "--out", str(out), "--push", "me/tokens", *options])


def test_a_push_makes_one_commit_with_the_files_of_the_export(hub, corpus, tmp_path, capsys):
    assert push(corpus, tmp_path / "out", "--split", "train", "--file-bytes", "1KiB", "--json") == 0
    files = {f"train/{path.name}": path.read_bytes() for path in (tmp_path / "out/train").iterdir()}
    assert len(files) == 3
    assert hub.files == {"me/tokens": files}
    assert (hub.commits, hub.is_private) == (["me/tokens"], {"me/tokens": True})
    shown = json.loads(capsys.readouterr().out)["pushed"]
    assert shown["repository"] == "me/tokens"
    assert shown["is_private"]
    assert push(corpus, tmp_path / "more", "--split", "validation", "--public") == 0
    assert len(hub.files["me/tokens"]) == 4
    assert "private" in capsys.readouterr().out  # what exists stays as it is


def test_files_that_are_in_the_hub_already_are_never_replaced(hub, corpus, tmp_path, capsys):
    assert push(corpus, tmp_path / "out", "--public") == 0
    assert hub.is_private == {"me/tokens": False}
    before = dict(hub.files["me/tokens"])
    assert push(corpus, tmp_path / "again") == 2
    assert "me/tokens has part-00000.parquet already" in capsys.readouterr().err
    assert not (tmp_path / "again").exists()
    assert hub.files["me/tokens"] == before


def test_an_account_that_the_hub_does_not_know_is_refused_before_the_export(hub, corpus, tmp_path, capsys):
    hub.refuses = True
    assert push(corpus, tmp_path / "out") == 1
    assert "hf auth login" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert hub.files == {}
