"""A proxy before an HTTP server that answers as one far away does: late, and sometimes not at all.

Each request waits for the time to first byte of such a server; its answer then passes at once, so an object
of 100 KB costs one delay and connections wait beside each other, as they do before an object store.  It runs
in a process of its own, whose time is its own::

    python tests/support/delay_proxy.py --port 9010 --target 9000 --delay-ms 30 --jitter-ms 10

It listens on loopback only.  The first line of its stdout is its port.  A line on stdin is JSON, and changes
``Faults``; it is answered with ``Counts``.  It ends when stdin does, or at the line ``null``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import subprocess
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass, fields, replace
from typing import cast

_END = b"\r\n\r\n"
_HOST = "127.0.0.1"
_MOST_HEADERS = 1 << 16
_CLOCK_S = 1e-3  # by which a timer may come early
_REFUSED = (
    b'<?xml version="1.0" encoding="UTF-8"?>'
    b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
)
_REFUSAL = b"HTTP/1.1 503 SlowDown\r\nContent-Type: application/xml\r\nContent-Length: %d" % len(_REFUSED)


@dataclass(frozen=True)
class Faults:
    """What goes wrong, and how late answers are.

    Attributes:
        delay_ms, jitter_ms: the time to first byte: uniform in delay ± jitter.
        busy: the share of requests without a body that are refused with the status 503.
        cut: the share of answers that end with a reset of the connection, in the middle of their body.
        cut_after: bytes of an answer, its headers among them, before it is cut; shorter ones pass.
    """

    delay_ms: float = 30.0
    jitter_ms: float = 10.0
    busy: float = 0.0
    cut: float = 0.0
    cut_after: int = 4096


@dataclass
class Counts:
    """Connections and requests that have come by; how many were refused, or had their answer cut; bytes of the
    server's answers; and seconds of this process."""

    connections: int = 0
    requests: int = 0
    busy: int = 0
    cut: int = 0
    received: int = 0
    cpu_s: float = 0.0


class DelayProxy:
    """The proxy before the server at the port ``target``, from ``__enter__`` to ``__exit__``.

    >>> with DelayProxy(9000, Faults(delay_ms=5)) as proxy:
    ...     before = proxy.change(busy=0.1)
    >>> before.requests
    0
    """

    def __init__(self, target: int, faults: Faults = Faults(), seed: int = 0) -> None:
        self._command = [sys.executable, __file__, "--target", str(target), "--seed", str(seed)]
        for name, value in asdict(faults).items():
            self._command += [f"--{name.replace('_', '-')}", str(value)]
        self.port = 0

    def __enter__(self) -> DelayProxy:
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        try:
            self.port = int(self._answer())
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with self._process as process:  # which closes its stdin, waits, and closes the rest
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it has ended by itself
                process.stdin.write("null\n")  # a forked process may have stdin, too
                process.stdin.flush()
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            process.wait()

    def counts(self) -> Counts:
        return self.change()

    def change(self, **faults: float) -> Counts:
        """Let other things go wrong from now on: fields of ``Faults``; return what has come by so far."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(faults) + "\n")
        self._process.stdin.flush()
        return Counts(**json.loads(self._answer()))

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the proxy ended with {self._process.wait()}")
        return line


class _Proxy:
    def __init__(self, target: int, faults: Faults, seed: int) -> None:
        self.target, self.faults, self.counts = target, faults, Counts()
        self.random = random.Random(seed)

    def delay(self) -> float:
        """Seconds until a request is heard."""
        jitter = self.random.uniform(-1, 1) * self.faults.jitter_ms
        return max(0.0, self.faults.delay_ms + jitter) / 1e3


class _Server(asyncio.Protocol):
    """The connection to the server; what it says passes at once."""

    def __init__(self, client: _Client) -> None:
        self._client = client

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._client.answer(data)

    def pause_writing(self) -> None:
        self._client.transport.pause_reading()

    def resume_writing(self) -> None:
        self._client.transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self._client.end()


class _Client(asyncio.Protocol):
    """A client's connection: its requests are told apart, and wait."""

    def __init__(self, proxy: _Proxy) -> None:
        self._proxy = proxy
        self._server: _Server | None = None
        self._pending = bytearray()  # of headers that are not whole
        self._body = 0  # bytes of the request's body that are still to come
        self._due = 0.0  # when what was sent is to be heard
        self._waiting: deque[tuple[float, bytes]] = deque()
        self._left = -1  # bytes until the answer is cut

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._proxy.counts.connections += 1
        self.transport = cast(asyncio.Transport, transport)
        self._loop = asyncio.get_running_loop()
        self._connecting = self._loop.create_task(self._connect())

    async def _connect(self) -> None:
        try:
            _, self._server = await self._loop.create_connection(
                lambda: _Server(self), _HOST, self._proxy.target
            )
        except OSError:
            self.transport.abort()
            return
        if self.transport.is_closing():
            self._server.transport.close()
        self._send()

    def data_received(self, data: bytes) -> None:
        while data:
            if self._body:
                part, data = data[: self._body], data[self._body :]
                self._body -= len(part)
                self._later(part)
                continue
            self._pending += data
            end = self._pending.find(_END)
            if end < 0:
                if len(self._pending) > _MOST_HEADERS:
                    self.transport.abort()
                return
            head, data = bytes(self._pending[: end + 4]), bytes(self._pending[end + 4 :])
            self._pending.clear()
            self._request(head)

    def _request(self, head: bytes) -> None:
        proxy = self._proxy
        proxy.counts.requests += 1
        self._body = _content_length(head)
        self._due = max(self._due, self._loop.time() + proxy.delay())
        if not self._body and proxy.random.random() < proxy.faults.busy:
            proxy.counts.busy += 1
            self._loop.call_at(self._due, self._say_busy, head.startswith(b"HEAD "))
            return
        self._left = proxy.faults.cut_after if proxy.random.random() < proxy.faults.cut else -1
        self._later(head)

    def _later(self, data: bytes) -> None:
        self._waiting.append((self._due, data))
        self._loop.call_at(self._due, self._send)

    def _send(self) -> None:
        """Let the server hear what is due, in its order; all of it later, while there is no connection."""
        now = self._loop.time() + _CLOCK_S
        while self._server is not None and self._waiting and self._waiting[0][0] <= now:
            self._server.transport.write(self._waiting.popleft()[1])

    def _say_busy(self, is_head: bool) -> None:
        if not self.transport.is_closing():
            self.transport.write(_REFUSAL + _END + (b"" if is_head else _REFUSED))

    def answer(self, data: bytes) -> None:
        """Pass on what the server says, up to where it is to be cut."""
        self._proxy.counts.received += len(data)
        if self._left < 0:
            self.transport.write(data)
            return
        self.transport.write(data[: self._left])
        self._left -= len(data)
        if self._left < 0:
            self._proxy.counts.cut += 1
            self._loop.call_soon(self.transport.abort)

    def end(self) -> None:
        """The server has closed the connection."""
        self.transport.close()

    def pause_writing(self) -> None:
        if self._server is not None:
            self._server.transport.pause_reading()

    def resume_writing(self) -> None:
        if self._server is not None:
            self._server.transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        if self._server is not None:
            self._server.transport.close()


def _content_length(head: bytes) -> int:
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length":
            return int(value)
    return 0


async def _serve(port: int, proxy: _Proxy) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Client(proxy), _HOST, port, backlog=512)
    print(server.sockets[0].getsockname()[1], flush=True)
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        change = json.loads(line)
        if change is None:
            break
        proxy.faults = replace(proxy.faults, **change)
        proxy.counts.cpu_s = time.process_time()
        print(json.dumps(asdict(proxy.counts)), flush=True)
    server.close()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0, help="to listen on (default: a free one)")
    parser.add_argument("--target", type=int, required=True, help="the server's port")
    parser.add_argument("--seed", type=int, default=0)
    for field in fields(Faults):
        kind = type(field.default)
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, default=field.default)
    given = parser.parse_args(arguments)
    faults = Faults(**{field.name: getattr(given, field.name) for field in fields(Faults)})
    asyncio.run(_serve(given.port, _Proxy(given.target, faults, given.seed)))


if __name__ == "__main__":
    main()
