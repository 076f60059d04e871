"""A proxy in front of an HTTP server, which hurts the requests that a test chooses."""

from __future__ import annotations

import contextlib
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field


@dataclass
class Request:
    """What the proxy read: the first line, the head with it, and the body."""

    line: str
    head: bytes
    body: bytes

    @property
    def method(self) -> str:
        return self.line.split(" ")[0]


Fault = Callable[["FaultyProxy", Request, socket.socket], None]
"""Answers a request in place of the server."""


def status(code: int, text: str = "SlowDown") -> Fault:
    body = f"<Error><Code>{text}</Code></Error>".encode()

    def answer(proxy: FaultyProxy, request: Request, client: socket.socket) -> None:
        head = f"HTTP/1.1 {code} {text}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode()
        client.sendall(head + (b"" if request.method == "HEAD" else body))

    return answer


def altered(change: Callable[[bytes, bytes], bytes]) -> Fault:
    """Send something else than the head and the body of the server's answer."""

    def answer(proxy: FaultyProxy, request: Request, client: socket.socket) -> None:
        head, _, body = proxy.forward(request).partition(b"\r\n\r\n")
        client.sendall(change(head + b"\r\n\r\n", body))

    return answer


passed_on = altered(lambda head, body: head + body)
"""No fault."""
short = altered(lambda head, body: head + body[:-3])
"""Close the connection in the middle of the body."""
shorter_length = altered(
    lambda head, body: re.sub(rb"(?i)content-length: \d+", b"Content-Length: %d" % (len(body) - 3), head) + body[:-3]
)
"""Leave out the last bytes, and say so in Content-Length alone: a whole answer, but not to this request."""
as_whole = altered(lambda head, body: re.sub(rb"(?i) 206 partial content", b" 200 OK", head) + body)
"""Send a part of a file with the status of a whole one, as some servers do."""
wrong_bytes = altered(lambda head, body: head + body[:-1] + bytes([body[-1] ^ 1]))
"""Flip a bit of the body."""
lost_answer = altered(lambda head, body: b"")
"""Let the server do what was asked, and close the connection without a word."""


def reset(proxy: FaultyProxy, request: Request, client: socket.socket) -> None:
    """Answer half, then reset the connection."""
    altered(lambda head, body: head + body[: len(body) // 2])(proxy, request, client)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def stall(seconds: float) -> Fault:
    """Answer nothing for a while, or until the test chooses other faults."""

    def answer(proxy: FaultyProxy, request: Request, client: socket.socket) -> None:
        proxy.changed.wait(seconds)

    return answer


def trickle(bytes_per_second: int) -> Fault:
    def answer(proxy: FaultyProxy, request: Request, client: socket.socket) -> None:
        content = proxy.forward(request)
        head = content.index(b"\r\n\r\n") + 4
        client.sendall(content[:head])
        for start in range(head, len(content), max(1, bytes_per_second // 10)):
            client.sendall(content[start : start + max(1, bytes_per_second // 10)])
            time.sleep(0.1)

    return answer


def without(*headers: str) -> Fault:
    """Drop some headers of the requests: a store that does not know them answers as if they were not there."""

    def answer(proxy: FaultyProxy, request: Request, client: socket.socket) -> None:
        head = request.head
        for name in headers:
            head = re.sub(rb"(?i)\r\n%s: [^\r]*" % name.encode(), b"", head)
        client.sendall(proxy.forward(Request(request.line, head, request.body)))

    return answer


def refusing(header: str) -> Fault:
    """Answer puts that have a header as OpenStack Swift does, which does not know it."""

    def answer(proxy: FaultyProxy, request: Request, client: socket.socket) -> None:
        if request.method == "PUT" and f"\r\n{header}:".encode() in request.head.lower():
            status(501, "NotImplemented")(proxy, request, client)
        else:
            client.sendall(proxy.forward(request))

    return answer


@dataclass
class FaultyProxy:
    """One request a connection, so that faults hit the requests that they are meant for."""

    upstream: tuple[str, int]
    faults: list[Fault] = field(default_factory=list)
    matches: str = ""
    requests: list[str] = field(default_factory=list)
    changed: threading.Event = field(default_factory=threading.Event)
    """Set when other faults are chosen, and at the end."""
    for_ever: Fault | None = None
    port: int = 0
    seconds_per_read: float = 0.0
    """How slowly the bodies of requests are taken."""

    def fail(self, *faults: Fault, matches: str = "", for_ever: Fault | None = None) -> None:
        """Hurt the next requests whose first line matches, one fault each; all later ones by `for_ever`, if given."""
        self.faults, self.matches, self.for_ever = list(faults), matches, for_ever
        self.requests.clear()
        self.changed.set()
        self.changed = threading.Event()

    def forward(self, request: Request) -> bytes:
        """The answer of the server, whole."""
        with socket.create_connection(self.upstream) as server:
            head = re.sub(rb"(?i)\r\nconnection: [^\r]*", b"", request.head)
            server.sendall(head.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1) + request.body)
            answer = b"".join(iter(lambda: server.recv(1 << 16), b""))
        head, _, body = answer.partition(b"\r\n\r\n")
        head = re.sub(rb"(?i)\r\nconnection: [^\r]*", b"", head)
        return head + b"\r\nConnection: close\r\n\r\n" + body

    def _serve(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            request = _read_request(client, self.seconds_per_read)
            if request is None:
                return
            self.requests.append(request.line)
            fault = None
            if re.search(self.matches, request.line):
                fault = self.faults.pop(0) if self.faults else self.for_ever
            if fault is None:
                client.sendall(self.forward(request))
            else:
                fault(self, request, client)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    @contextlib.contextmanager
    def running(self) -> Iterator[FaultyProxy]:
        listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = listener.getsockname()[1]
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        try:
            yield self
        finally:
            self.changed.set()
            listener.shutdown(socket.SHUT_RDWR)
            listener.close()


def _read_request(client: socket.socket, seconds_per_read: float) -> Request | None:
    content = b""
    while b"\r\n\r\n" not in content:
        more = client.recv(1 << 16)
        if not more:
            return None
        content += more
    head, _, body = content.partition(b"\r\n\r\n")
    if b"100-continue" in head.lower():
        client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
    length = re.search(rb"(?i)content-length: (\d+)", head)
    parts, missing = [body], int(length[1]) - len(body) if length else 0
    while missing > 0:
        time.sleep(seconds_per_read)
        parts.append(client.recv(1 << 20))
        if not parts[-1]:
            return None
        missing -= len(parts[-1])
    return Request(head.split(b"\r\n")[0].decode(), head + b"\r\n\r\n", b"".join(parts))
