"""SeaweedFS behind a line that takes its time: what goes to the server waits, what comes back is counted.

    python -m benchmark.peers.distant

starts the server, prints its port, and ends when its standard input does. It is run by the environment of
`make test-remote`, which has the server.
"""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from benchmark.processes import ROOT

_CHUNK_BYTES = 256 << 10


@dataclass(slots=True)
class Line:
    """A TCP line to a port of this machine, in a thread of this process.

    Args:
        seconds: what arrives from a client is passed on so much later, so that an answer takes this long.
        received: bytes that the server sent, heads included.
        requests: that clients sent, as far as each begins a packet.
    """

    to_port: int
    seconds: float
    port: int = 0
    received: int = 0
    requests: int = 0

    @contextmanager
    def running(self) -> Iterator["Line"]:
        loop = asyncio.new_event_loop()
        server = loop.run_until_complete(asyncio.start_server(self._connected, "127.0.0.1", 0))
        self.port = server.sockets[0].getsockname()[1]
        thread = threading.Thread(target=loop.run_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            from_server, to_server = await asyncio.open_connection("127.0.0.1", self.to_port)
            await asyncio.gather(self._out(reader, to_server), self._back(from_server, writer))

    async def _out(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while chunk := await reader.read(_CHUNK_BYTES):
                self.requests += chunk.startswith((b"GET ", b"HEAD "))
                await asyncio.sleep(self.seconds)
                writer.write(chunk)
                await writer.drain()
        writer.close()

    async def _back(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while chunk := await reader.read(_CHUNK_BYTES):
                self.received += len(chunk)
                writer.write(chunk)
                await writer.drain()
        writer.close()


@contextmanager
def seaweedfs(python: str) -> Iterator[int]:
    """The port of a server with an empty bucket, run by the interpreter of an environment that has it."""
    command = [python, "-m", "benchmark.peers.distant"]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline())
    finally:
        process.stdin.close()
        process.wait()
        process.stdout.close()


def main() -> None:
    from tests.store.servers import seaweedfs_server

    with seaweedfs_server() as port:
        sys.stdout.write(f"{port}\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    main()
