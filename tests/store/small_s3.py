"""A small S3 in memory, in a thread of this process: conditional writes, uploads in parts, lists by pages.

It checks no signatures. It can let requests in by their access key, as Amazon does with tokens that expire.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

from tests.store.servers import BUCKET, send_object

_EXPIRED = "<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"
_PAGE = 1_000


@dataclass(frozen=True)
class Object:
    """What a key holds, and since when, in seconds since 1970."""

    content: bytes
    written: float

    @property
    def tag(self) -> str:
        return f'"{hashlib.sha256(self.content).hexdigest()[:16]}"'


class SmallS3(http.server.ThreadingHTTPServer):
    """The bucket `BUCKET`, and no other.

    Attributes:
        objects: by key.
        ever: all keys that there were: lists go on to show their folders, as some servers do.
        keys: the access keys that are good; None: all are.
        status, refusal: the answer to others.
        let_in, refused: requests with each access key.
        may_delete: otherwise requests that remove objects are refused, key by key, as by Amazon.
    """

    daemon_threads = True
    keys: set[str] | None = None
    status, refusal = 400, _EXPIRED
    may_delete = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, Object] = {}
        self.ever: set[str] = set()
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.lock = threading.RLock()
        self.let_in: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()


class _Handler(http.server.BaseHTTPRequestHandler):
    server: SmallS3
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16

    def log_message(self, *_: object) -> None:
        pass

    def _handle(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        found = re.search(r"Credential=([^/]+)/", self.headers.get("Authorization", ""))
        access, server = found[1] if found else "", self.server
        url = urlsplit(self.path)
        bucket, _, key = unquote(url.path)[1:].partition("/")
        with server.lock:
            is_good = server.keys is None or access in server.keys
            (server.let_in if is_good else server.refused)[access] += 1
            if not is_good:
                self._answer(server.status, server.refusal)
            elif bucket != BUCKET:
                self._answer(404, "<Error><Code>NoSuchBucket</Code></Error>")
            else:
                getattr(self, f"_{self.command.lower()}")(key, parse_qs(url.query, keep_blank_values=True), body)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _handle  # noqa: N815 - as http.server names them

    def _answer(self, code: int, body: bytes | str = b"", **headers: str) -> None:
        content = body.encode() if isinstance(body, str) else body
        self.send_response(code)
        for name, value in ({"Content-Length": str(len(content))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _error(self, status: int, code: str) -> None:
        self._answer(status, f"<Error><Code>{code}</Code></Error>")

    def _put(self, key: str, query: dict[str, Any], body: bytes) -> None:
        if "partNumber" in query:
            self.server.uploads[query["uploadId"][0]][int(query["partNumber"][0])] = body
            return self._answer(200, ETag='"part"')
        before, wanted = self.server.objects.get(key), self.headers.get("If-Match")
        if wanted and before is None:
            return self._error(404, "NoSuchKey")
        if (self.headers.get("If-None-Match") and before) or (wanted and before and wanted != before.tag):
            return self._error(412, "PreconditionFailed")
        return self._write(key, body)

    def _write(self, key: str, content: bytes, answer: str = "") -> None:
        self.server.ever.add(key)
        written = self.server.objects[key] = Object(content, time.time())
        self._answer(200, answer, ETag=written.tag)

    def _post(self, key: str, query: dict[str, Any], body: bytes) -> None:
        if "delete" in query:
            names = re.findall(r"<Key>(.*?)</Key>", body.decode())
            if not self.server.may_delete:
                code = "<Code>AccessDenied</Code><Message>Access Denied</Message>"
                errors = "".join(f"<Error><Key>{name}</Key>{code}</Error>" for name in names)
                return self._answer(200, f"<DeleteResult>{errors}</DeleteResult>")
            for name in names:
                self.server.objects.pop(unescape(name, {"&quot;": '"', "&apos;": "'"}), None)
            deleted = "".join(f"<Deleted><Key>{name}</Key></Deleted>" for name in names)
            return self._answer(200, f"<DeleteResult>{deleted}</DeleteResult>")
        if "uploads" in query:
            upload = str(len(self.server.uploads))
            self.server.uploads[upload] = {}
            kind = "InitiateMultipartUploadResult"
            return self._answer(200, f"<{kind}><UploadId>{upload}</UploadId></{kind}>")
        parts = self.server.uploads.pop(query["uploadId"][0], None)
        if parts is None:
            return self._error(404, "NoSuchUpload")
        result = "<CompleteMultipartUploadResult><ETag>tag</ETag></CompleteMultipartUploadResult>"
        return self._write(key, b"".join(parts[number] for number in sorted(parts)), result)

    def _delete(self, key: str, query: dict[str, Any], _: bytes) -> None:
        self.server.uploads.pop(query.get("uploadId", [""])[0], None)
        self.server.objects.pop(key, None)
        self._answer(204)

    def _get(self, key: str, query: dict[str, Any], _: bytes) -> None:
        if "list-type" in query:
            return self._answer(200, self._listed(query))
        found = self.server.objects.get(key)
        if found is None:
            return self._error(404, "NoSuchKey")
        return send_object(self, found.content, found.written, found.tag)

    _head = _get

    def _listed(self, query: dict[str, Any]) -> str:
        prefix, delimiter, token = (query.get(name, [""])[0] for name in ("prefix", "delimiter", "continuation-token"))
        entries = dict[str, str]()
        for key in sorted(key for key in self.server.ever | self.server.objects.keys() if key.startswith(prefix)):
            head, mark, _ = key.removeprefix(prefix).partition(delimiter) if delimiter else (key, "", "")
            if mark:
                folder = prefix + head + mark
                entries[folder] = f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>"
            elif found := self.server.objects.get(key):
                entries[key] = (
                    f"<Contents><Key>{escape(key)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
                    f"<ETag>{escape(found.tag)}</ETag><Size>{len(found.content)}</Size></Contents>"
                )
        start, texts = int(token or 0), [*entries.values()]
        more = f"<NextContinuationToken>{start + _PAGE}</NextContinuationToken>" if len(texts) > start + _PAGE else ""
        text = f"<IsTruncated>{str(bool(more)).lower()}</IsTruncated>{more}{''.join(texts[start : start + _PAGE])}"
        return f"<ListBucketResult><Name>{BUCKET}</Name>{text}</ListBucketResult>"


@contextlib.contextmanager
def small_s3_server() -> Iterator[SmallS3]:
    with SmallS3() as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        try:
            yield server
        finally:
            server.shutdown()
