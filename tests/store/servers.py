"""Servers on the loopback interface: one for files, with ranges and entity tags, and one that speaks S3."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

_S3 = """
import sys
from werkzeug.serving import WSGIRequestHandler, make_server
from moto.server import DomainDispatcherApplication, create_backend_app
WSGIRequestHandler.log_request = lambda *arguments: None
server = make_server("127.0.0.1", 0, DomainDispatcherApplication(create_backend_app), threaded=True)
print(server.server_port, flush=True)
server.serve_forever()
"""


class FileHandler(http.server.BaseHTTPRequestHandler):
    """Files of `directory`, which a subclass names."""

    directory: Path
    has_tags = True

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def log_message(self, *arguments: object) -> None:
        pass

    def _answer(self, *, with_body: bool) -> None:
        path = self.directory / unquote(self.path).lstrip("/")
        if "secret" in path.name:
            self.send_error(403)
            return
        if not path.is_file():
            self.send_error(404)
            return
        content = path.read_bytes()
        tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
        if self.has_tags and self.headers.get("If-Match", tag) != tag:
            self.send_error(412)
            return
        start, stop = 0, len(content)
        wanted = self.headers.get("Range", "")
        if wanted.startswith("bytes="):
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start, stop = int(first), min(stop, int(last) + 1 if last else stop)
            if start >= len(content):
                self.send_error(416)
                return
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(content)}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(stop - start))
        self.send_header("Last-Modified", self.date_time_string(int(path.stat().st_mtime)))
        if self.has_tags:
            self.send_header("ETag", tag)
        self.end_headers()
        if with_body:
            self.wfile.write(content[start:stop])


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
def s3_server() -> Iterator[int]:
    """A server of moto in a process of its own; gives the port."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    process = subprocess.Popen([sys.executable, "-c", _S3], stdout=subprocess.PIPE, env=environment, text=True)
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        yield port
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def make_bucket(port: int, name: str) -> None:
    """Make a bucket, empty if there was one."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}/{name}", method="PUT")
    for _ in range(50):
        try:
            with urllib.request.urlopen(request, timeout=5):
                return
        except urllib.error.URLError as error:
            if isinstance(error, urllib.error.HTTPError):
                raise
            time.sleep(0.1)
