"""A hub on this machine: the few answers of the Hugging Face hub that a download needs."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"

Repositories = Mapping[str, Mapping[str, bytes]]
"""``models/OWNER/NAME`` or ``datasets/OWNER/NAME`` to path to content."""


@contextmanager
def serve(repositories: Repositories) -> Iterator[tuple[str, list[str]]]:
    """The address of a running hub, and the paths that it was asked for so far."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            url = urlsplit(self.path)
            path = unquote(url.path).strip("/")
            asked.append(path)
            status, content, headers = _response(repositories, path, parse_qs(url.query), body)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_HEAD = do_POST = do_GET  # noqa: N815 -- names of the base class

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _response(
    repositories: Repositories, path: str, query: Mapping[str, list[str]], body: bytes
) -> tuple[int, bytes, dict[str, str]]:
    missing = 404, b'{"error": "not found"}', {"X-Error-Code": "RepoNotFound", "X-Error-Message": "not found"}
    parts = path.split("/")
    is_api = parts[0] == "api"
    parts = parts[1:] if is_api else parts
    kind = parts.pop(0) if parts and parts[0] in ("models", "datasets") else "models"
    key, rest = f"{kind}/{'/'.join(parts[:2])}", parts[2:]
    files = repositories.get(key)
    if files is None:
        return missing
    if is_api:
        if rest[:1] == ["revision"] and rest[1] not in ("main", COMMIT):
            return 404, b"{}", {"X-Error-Code": "RevisionNotFound", "X-Error-Message": "no such revision"}
        is_deep = query.get("recursive", ["false"])[0].lower() in ("true", "1")
        return _api(key.partition("/")[2], files, rest, body, is_deep=is_deep)
    if rest[:1] != ["resolve"]:
        return missing
    content = files.get("/".join(rest[2:]))
    if content is None:
        return 404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}
    return 200, content, {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": COMMIT}


def _api(
    name: str, files: Mapping[str, bytes], rest: list[str], body: bytes, *, is_deep: bool
) -> tuple[int, bytes, dict[str, str]]:
    json_type = {"Content-Type": "application/json"}
    if rest[:1] == ["tree"]:
        below = "".join(f"{part}/" for part in rest[2:])
        listed = {path: content for path, content in files.items() if path.startswith(below)}
        if below and not listed:
            return 404, b"{}", {"X-Error-Code": "EntryNotFound"}
        folders = {f"{below}{path[len(below) :].partition('/')[0]}" for path in listed if "/" in path[len(below) :]}
        found = [_entry(path, content) for path, content in listed.items() if is_deep or "/" not in path[len(below) :]]
        return 200, json.dumps([*found, *map(_folder, sorted(folders))]).encode(), json_type
    if rest[:1] == ["paths-info"]:
        wanted = _wanted_paths(body)
        found = [_entry(path, content) for path, content in files.items() if path in wanted]
        folders = {path for path in wanted if any(file.startswith(f"{path}/") for file in files)}
        found += map(_folder, sorted(folders))
        return 200, json.dumps(found).encode(), json_type
    more = {"private": False, "disabled": False, "gated": False, "downloads": 0, "likes": 0, "tags": []}
    answer = {"_id": "0", "id": name, "sha": COMMIT, **more, "siblings": [{"rfilename": path} for path in files]}
    return 200, json.dumps(answer).encode(), json_type


def _wanted_paths(body: bytes) -> list[str]:
    try:
        found = json.loads(body)["paths"]
    except ValueError:
        found = parse_qs(body.decode()).get("paths", [])
    return [found] if isinstance(found, str) else list(found)


def _entry(path: str, content: bytes) -> dict[str, Any]:
    return {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}


def _folder(path: str) -> dict[str, Any]:
    return {"type": "directory", "path": path, "size": 0, "oid": "0" * 40}
