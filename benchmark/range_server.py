"""A web server of files in ranges that is as far away and as narrow as one asks for: a store for benchmarks.

    python -m benchmark.range_server FOLDER --milliseconds 20 --megabytes-per-second 200

It prints its port. Each request waits for the latency, and all connections share the bandwidth. ``GET /.counts`` gives
what was asked for and sent so far, in bytes of bodies, as JSON. With ``--shard FILE``, every shard that the folder
lacks has the bytes of that file: a corpus of a trillion tokens takes the place of one shard.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import mmap
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from email.utils import formatdate
from pathlib import Path
from urllib.parse import unquote

from benchmark.processes import ROOT

COUNTS = "/.counts"
_CHUNK_BYTES = 256 << 10
_BURST_SECONDS = 0.005  # sleeps end up to a millisecond late: what is lost that way may be sent at once


@dataclass(slots=True)
class Counts:
    """What was asked for and sent, of shards and of everything else.

    Args:
        most_at_once: requests that were being answered at the same time.
    """

    shard_requests: int = 0
    shard_bytes: int = 0
    other_requests: int = 0
    other_bytes: int = 0
    most_at_once: int = 0

    def add(self, name: str, *, num_requests: int = 0, num_bytes: int = 0) -> None:
        if name.startswith("shard-"):
            self.shard_requests += num_requests
            self.shard_bytes += num_bytes
        else:
            self.other_requests += num_requests
            self.other_bytes += num_bytes


@dataclass(slots=True)
class Line:
    """A line that all connections share: bytes are sent when the ones before them have had their time.

    Args:
        bytes_per_second: 0: as fast as it goes.
    """

    bytes_per_second: float
    _free_at: float = 0.0

    async def wait_for(self, num_bytes: int) -> None:
        if self.bytes_per_second:
            now = asyncio.get_running_loop().time()
            self._free_at = max(self._free_at, now - _BURST_SECONDS) + num_bytes / self.bytes_per_second
            if self._free_at > now:
                await asyncio.sleep(self._free_at - now)


@dataclass(slots=True, kw_only=True)
class Server:
    """Answers requests for the files of a folder.

    Args:
        latency_seconds: before the first byte of each answer.
        shard: stands for every shard that the folder lacks.
    """

    folder: Path
    latency_seconds: float
    line: Line
    shard: Path | None = None
    counts: Counts = field(default_factory=Counts)
    _files: dict[Path, tuple[memoryview, str]] = field(default_factory=dict)
    _at_once: int = 0

    async def serve(self, listener: socket.socket) -> None:
        """Answer every connection until the process ends."""
        loop = asyncio.get_running_loop()
        connections: set[asyncio.Task[None]] = set()
        while True:
            connection, _ = await loop.sock_accept(listener)
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            task = loop.create_task(self._talk(connection))
            connections.add(task)
            task.add_done_callback(connections.discard)

    async def _talk(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        unread = b""
        try:
            while True:
                while b"\r\n\r\n" not in unread:
                    received = await loop.sock_recv(connection, 1 << 16)
                    if not received:
                        return
                    unread += received
                head, _, unread = unread.partition(b"\r\n\r\n")
                await self._answer(connection, head.decode("latin-1"))
        except OSError:  # the reader left
            return
        finally:
            connection.close()

    async def _answer(self, connection: socket.socket, head: str) -> None:
        loop = asyncio.get_running_loop()
        request, *lines = head.split("\r\n")
        verb, target, _ = request.split(" ", 2)
        fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        name = unquote(target).lstrip("/")
        if target == COUNTS:
            body = json.dumps(asdict(self.counts)).encode()
            await loop.sock_sendall(connection, _head("200 OK", len(body)) + body)
            return
        self._at_once += 1
        self.counts.most_at_once = max(self.counts.most_at_once, self._at_once)
        try:
            await asyncio.sleep(self.latency_seconds)
            body, head_of_answer = self._part(name, fields)
            sent = body if verb == "GET" else body[:0]
            file_name = name.rpartition("/")[2]
            self.counts.add(file_name, num_requests=1)
            await loop.sock_sendall(connection, head_of_answer)
            for at in range(0, len(sent), _CHUNK_BYTES):
                chunk = sent[at : at + _CHUNK_BYTES]
                await self.line.wait_for(len(chunk))
                self.counts.add(file_name, num_bytes=len(chunk))
                await loop.sock_sendall(connection, chunk)
        finally:
            self._at_once -= 1

    def _part(self, name: str, fields: dict[str, str]) -> tuple[memoryview, bytes]:
        """What is sent of a file, and the head of the answer."""
        found = self._file(name)
        if found is None:
            return memoryview(b""), _head("404 Not Found", 0)
        content, tag = found
        if fields.get("if-match", tag) != tag:
            return memoryview(b""), _head("412 Precondition Failed", 0)
        wanted = fields.get("range", "").removeprefix("bytes=")
        if not wanted:
            return content, _head("200 OK", len(content), ETag=tag)
        first, _, last = wanted.partition("-")
        start = int(first)
        stop = min(len(content), int(last) + 1 if last else len(content))
        if start >= stop:
            return memoryview(b""), _head("416 Range Not Satisfiable", 0)
        place = {"Content-Range": f"bytes {start}-{stop - 1}/{len(content)}"}
        return content[start:stop], _head("206 Partial Content", stop - start, ETag=tag, **place)

    def _file(self, name: str) -> tuple[memoryview, str] | None:
        """The bytes and the entity tag of a file; mapped once."""
        path = self.folder / name
        if self.shard is not None and path.name.startswith("shard-") and not path.is_file():
            path = self.shard
        if path not in self._files:
            if not path.is_file():
                return None
            with path.open("rb") as file:
                size = path.stat().st_size
                content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b"")
            self._files[path] = content, f'"{path.stat().st_mtime_ns:x}-{size:x}"'
        return self._files[path]


def _head(status: str, num_bytes: int, **fields: str) -> bytes:
    fields = {"Content-Length": str(num_bytes), "Last-Modified": formatdate(0, usegmt=True), **fields}
    return "".join(
        [f"HTTP/1.1 {status}\r\n", *(f"{name}: {value}\r\n" for name, value in fields.items()), "\r\n"]
    ).encode()


@contextmanager
def range_server(
    folder: Path, *, milliseconds: float, megabytes_per_second: float, shard: Path | None = None
) -> Iterator[str]:
    """Serve a folder from a process of its own; gives the URL."""
    command = [sys.executable, "-m", "benchmark.range_server", str(folder)]
    command += ["--milliseconds", str(milliseconds), "--megabytes-per-second", str(megabytes_per_second)]
    command += ["--shard", str(shard)] if shard is not None else []
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmark.range_server")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--milliseconds", type=float, default=20.0, help="before the first byte of an answer")
    parser.add_argument("--megabytes-per-second", type=float, default=200.0, help="of all connections; 0: no limit")
    parser.add_argument("--shard", type=Path, help="stands for every shard that the folder lacks")
    arguments = parser.parse_args()
    server = Server(
        folder=arguments.folder,
        latency_seconds=arguments.milliseconds / 1e3,
        line=Line(arguments.megabytes_per_second * 1e6),
        shard=arguments.shard,
    )
    with socket.create_server(("127.0.0.1", 0), backlog=512) as listener:
        listener.setblocking(False)
        sys.stdout.write(f"{listener.getsockname()[1]}\n")
        sys.stdout.flush()
        asyncio.run(server.serve(listener))


if __name__ == "__main__":
    main()
