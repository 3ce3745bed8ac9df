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

__all__ = ["Counts", "DelayProxy", "Faults", "main"]


_END = b"\r\n\r\n"
_HOST = "127.0.0.1"
_MOST_HEADERS = 1 << 16
_CLOCK_S = 1e-3  # by which a timer may come early
_CODES = {429: "TooManyRequests", 500: "InternalError", 503: "SlowDown"}


@dataclass(frozen=True)
class Faults:
    """What goes wrong, and how late answers are.

    Attributes:
        delay_ms, jitter_ms: the time to first byte: uniform in delay ± jitter.
        busy: the share of requests without a body that are answered with ``status``.
        status: of these answers.
        cut: the share of answers that end with a reset of the connection, in the middle of their body.
        stall: the share of answers that stop there, and never end, while the connection stays.
        cut_after: bytes of an answer, its headers among them, before it is cut or stops; shorter ones pass.
    """

    delay_ms: float = 30.0
    jitter_ms: float = 10.0
    busy: float = 0.0
    status: int = 503
    cut: float = 0.0
    stall: float = 0.0
    cut_after: int = 4096


@dataclass
class Counts:
    """What has come by.

    Attributes:
        connections: that clients have made.
        requests: that they have sent.
        busy: that were answered with the status of a busy server.
        cut: whose answers were cut.
        stalled: whose answers stopped.
        received: bytes of the server's answers.
        cpu_s: seconds of this process.
    """

    connections: int = 0
    requests: int = 0
    busy: int = 0
    cut: int = 0
    stalled: int = 0
    received: int = 0
    cpu_s: float = 0.0


class DelayProxy:
    """The proxy, in a process of its own, from ``__enter__`` to ``__exit__``.

    Args:
        target: the port of the server.
        faults: what goes wrong from the beginning on.
        seed: of delays and faults.

    Attributes:
        port: on which it listens.

    Example:
        >>> with DelayProxy(9000, Faults(delay_ms=5)) as proxy:
        ...     before = proxy.change(busy=0.1)
        >>> before.requests
        0
    """

    def __init__(self, target: int, faults: Faults = Faults(), seed: int = 0) -> None:
        self._command = [sys.executable, __file__, "--target", str(target)]
        self._command += ["--seed", str(seed)]
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
        """What has come by so far."""
        return self.change()

    def change(self, **faults: float) -> Counts:
        """Let other things go wrong from now on.

        Args:
            faults: fields of ``Faults``.

        Returns:
            What has come by so far.

        Raises:
            TypeError: there is no such field.
        """
        for name in faults.keys() - asdict(Faults()).keys():
            raise TypeError(f"there is no fault {name!r}")
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
        self._left = -1  # bytes until the answer is cut, or stops
        self._stalls = False  # the answer stops then
        self._stalled = False  # it has: nobody hears of this connection again

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
            self._loop.call_at(self._due, self._say_busy, head.startswith(b"HEAD "), proxy.faults.status)
            return
        cuts = proxy.random.random() < proxy.faults.cut
        self._stalls = not cuts and proxy.random.random() < proxy.faults.stall
        self._left = proxy.faults.cut_after if cuts or self._stalls else -1
        self._later(head)

    def _later(self, data: bytes) -> None:
        self._waiting.append((self._due, data))
        self._loop.call_at(self._due, self._send)

    def _send(self) -> None:
        """Let the server hear what is due, in its order; all of it later, while there is no connection."""
        now = self._loop.time() + _CLOCK_S
        while self._server is not None and self._waiting and self._waiting[0][0] <= now:
            self._server.transport.write(self._waiting.popleft()[1])

    def _say_busy(self, is_head: bool, status: int) -> None:
        if not self.transport.is_closing():
            self.transport.write(_refusal(status, is_head))

    def answer(self, data: bytes) -> None:
        """Pass on what the server says."""
        self._proxy.counts.received += len(data)
        if self._stalled:
            return
        if self._left < 0:
            self.transport.write(data)
            return
        if len(data) <= self._left:
            self._left -= len(data)
            self.transport.write(data)
            return
        self.transport.write(data[: self._left])
        self._left = -1
        if self._stalls:
            self._proxy.counts.stalled += 1
            self._stalled = True
            return
        self._proxy.counts.cut += 1
        self._loop.call_soon(self.transport.abort)

    def end(self) -> None:
        """The server has closed the connection."""
        if not self._stalled:
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


def _refusal(status: int, is_head: bool) -> bytes:
    code = _CODES.get(status, "ServiceUnavailable")
    body = f"<Error><Code>{code}</Code><Message>Please reduce your request rate.</Message></Error>"
    body = f'<?xml version="1.0" encoding="UTF-8"?>{body}'
    head = f"HTTP/1.1 {status} {code}", "Content-Type: application/xml", f"Content-Length: {len(body)}"
    return "\r\n".join(head).encode() + _END + (b"" if is_head else body.encode())


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
    """Serve until stdin ends; the first line of stdout is the port."""
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
