"""Servers on the loopback interface: one for files, with ranges and entity tags, and one that speaks S3."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path
from urllib.parse import unquote

from tokshard.store import files_below, open_store


def send_object(handler: http.server.BaseHTTPRequestHandler, content: bytes, written: float, tag: str = "") -> None:
    """Answer a request for a file with all of it, or with the range that is asked for, if it is still the same file."""
    if tag and handler.headers.get("If-Match", tag) != tag:
        return handler.send_error(412)
    size, part = len(content), re.match(r"bytes=(\d+)-(\d*)", handler.headers.get("Range", ""))
    start, stop = (int(part[1]), min(size, int(part[2] or size) + 1)) if part else (0, size)
    if part and start >= size:
        return handler.send_error(416)
    handler.send_response(206 if part else 200)
    headers = {"Content-Length": stop - start, "Last-Modified": formatdate(written, usegmt=True)}
    headers |= {"Content-Range": f"bytes {start}-{stop - 1}/{size}"} if part else {}
    headers |= {"ETag": tag} if tag else {}
    for name, value in headers.items():
        handler.send_header(name, str(value))
    handler.end_headers()
    if handler.command != "HEAD":
        handler.wfile.write(content[start:stop])
    return None


class FileHandler(http.server.BaseHTTPRequestHandler):
    """Files of `directory`, which a subclass names."""

    directory: Path
    has_tags = True

    def do_GET(self) -> None:
        path = self.directory / unquote(self.path).lstrip("/")
        if not path.is_file():
            return self.send_error(404)
        content = path.read_bytes()
        tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"' if self.has_tags else ""
        return send_object(self, content, path.stat().st_mtime, tag)

    do_HEAD = do_GET  # noqa: N815 - as http.server names it

    def log_message(self, *arguments: object) -> None:
        pass


@contextlib.contextmanager
def file_server(directory: Path, *, has_tags: bool = True) -> Iterator[int]:
    """Serve the files of a directory; gives the port."""
    handler = type("Handler", (FileHandler,), {"directory": directory, "has_tags": has_tags})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()


@contextlib.contextmanager
def seaweedfs_server() -> Iterator[int]:
    """SeaweedFS, a server that people run; gives the port. It takes three seconds to start."""
    actions = ["Admin", "Read", "Write", "List", "Tagging"]
    key = {"accessKey": "test", "secretKey": "the-secret"}
    identities = [
        {"name": "test", "credentials": [key], "actions": actions},
        {"name": "anonymous", "actions": actions},  # for requests that tests make by hand
    ]
    with tempfile.TemporaryDirectory(prefix="seaweedfs-") as folder:
        Path(folder, "s3.json").write_text(json.dumps({"identities": identities}))
        names = ("master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc")
        ports = free_ports(len(names) + 2)
        options = dict(zip(("s3.port", "s3.port.grpc", *names), map(str, ports), strict=True)) | {
            "ip": "127.0.0.1",
            "ip.bind": "127.0.0.1",
            "dir": folder,
            "filer": "true",
            "filer.localSocket": f"{folder}/filer.sock",
            "s3": "true",
            "s3.localSocket": f"{folder}/s3.sock",
            "s3.config": f"{folder}/s3.json",
            "s3.port.iceberg": "0",
            "s3.port.lance": "0",
            "master.telemetry": "false",
            "master.volumeSizeLimitMB": "256",
            "volume.max": "100",
        }
        with open(f"{folder}/log", "w+", encoding="utf-8") as log:
            words = [str(Path(sys.executable).parent / "weed"), "server", *(f"-{a}={b}" for a, b in options.items())]
            process = subprocess.Popen(words, stdout=log, stderr=log)
            try:
                make_bucket(ports[0], BUCKET)
                yield ports[0]
            finally:
                process.kill()  # it takes its time to end by itself, and its data go anyhow
                process.wait()


BUCKET = "bucket"
"""The one that servers have, empty."""


def copied(directory: str | Path, location: str) -> str:
    """Put the files of a directory to a location of a store, which is returned."""
    store, here = open_store(location), open_store(directory)
    for name in files_below(here, ""):
        store.put(name, here.get(name))
    return location


def free_ports(number: int) -> list[int]:
    """Ports on which nobody listens now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)]
        return [one.getsockname()[1] for one in sockets]


def make_bucket(port: int, name: str) -> None:
    """Make a bucket as soon as the server answers."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}/{name}", method="PUT")
    deadline = time.monotonic() + 30
    while True:
        try:
            with urllib.request.urlopen(request, timeout=5):
                return
        except OSError:  # it does not listen yet, or not all of its parts are up
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
