"""A small S3 in memory that lets requests in by their access key, as Amazon does with tokens that expire."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from email.utils import formatdate
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

_EXPIRED = "<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"


class TokenServer(http.server.ThreadingHTTPServer):
    """Objects of any bucket, by path.

    Attributes:
        keys: the access keys that are good; None: all are.
        status, refusal: the answer to others.
        let_in, refused: requests with each access key.
        on_request: called before each request.
    """

    daemon_threads = True
    status, refusal = 400, _EXPIRED

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, bytes] = {}
        self.lock = threading.RLock()
        self.keys: set[str] | None = None
        self.let_in: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.on_request: Callable[[], None] = lambda: None


class _Handler(http.server.BaseHTTPRequestHandler):
    server: TokenServer
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, code: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(code)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _object(self) -> None:
        url = urlsplit(self.path)
        path, query = unquote(url.path).strip("/"), parse_qs(url.query, keep_blank_values=True)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        found = re.search(r"Credential=([^/]+)/", self.headers.get("Authorization", ""))
        server = self.server
        with server.lock:
            key = found[1] if found else ""
            server.on_request()
            if server.keys is not None and key not in server.keys:
                server.refused[key] += 1
                return self._answer(server.status, server.refusal.encode(), Content_Type="application/xml")
            server.let_in[key] += 1
            if "list-type" in query:
                return self._answer(200, self._listed(path, query).encode())
            if self.command == "POST":  # delete
                names = re.findall(r"<Key>(.*?)</Key>", body.decode())
                for name in names:
                    server.objects.pop(f"{path}/{name}", None)
                text = "".join(f"<Deleted><Key>{name}</Key></Deleted>" for name in names)
                return self._answer(200, f"<DeleteResult>{text}</DeleteResult>".encode())
            if self.command == "DELETE":
                server.objects.pop(path, None)
                return self._answer(204)
            if self.command == "PUT":
                return self._put(path, body)
            return self._get(path)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _object  # noqa: N815 - as http.server names them

    def _put(self, path: str, body: bytes) -> None:
        before = self.server.objects.get(path)
        wanted = self.headers.get("If-Match")
        if (self.headers.get("If-None-Match") and before is not None) or (wanted and wanted != _tag(before)):
            return self._answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
        self.server.objects[path] = body
        return self._answer(200, ETag=_tag(body))

    def _get(self, path: str) -> None:
        data = self.server.objects.get(path)
        if data is None:
            return self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
        headers = {"ETag": _tag(data), "Last_Modified": formatdate(1e9, usegmt=True)}
        part = re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if part is None or self.command == "HEAD":
            return self._answer(200, data, **headers)
        start, stop = int(part[1]), min(len(data), int(part[2] or len(data) - 1) + 1)
        return self._answer(206, data[start:stop], Content_Range=f"bytes {start}-{stop - 1}/{len(data)}", **headers)

    def _listed(self, bucket: str, query: dict[str, Any]) -> str:
        prefix, delimiter = query.get("prefix", [""])[0], query.get("delimiter", [""])[0]
        start = f"{bucket}/{prefix}"
        keys = [path.removeprefix(f"{bucket}/") for path in sorted(self.server.objects) if path.startswith(start)]
        folders, text = dict[str, None](), ""
        for key in keys:
            head, mark, _ = key.removeprefix(prefix).partition(delimiter) if delimiter else ("", "", "")
            if mark:
                folders[prefix + head + mark] = None
                continue
            data = self.server.objects[f"{bucket}/{key}"]
            text += (
                f"<Contents><Key>{escape(key)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
                f"<ETag>{escape(_tag(data))}</ETag><Size>{len(data)}</Size></Contents>"
            )
        text += "".join(f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>" for name in folders)
        return f"<ListBucketResult><Name>b</Name><IsTruncated>false</IsTruncated>{text}</ListBucketResult>"


def _tag(data: bytes | None) -> str:
    return '"none"' if data is None else f'"{hashlib.sha256(data).hexdigest()[:16]}"'


@contextlib.contextmanager
def token_server() -> Iterator[TokenServer]:
    """A running one; any bucket is there, and empty."""
    with TokenServer() as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        try:
            yield server
        finally:
            server.shutdown()
