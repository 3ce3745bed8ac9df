"""The proxy passes on what a server says, late, and with the faults that were asked for."""

from __future__ import annotations

import http.client
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import delay_proxy
import pytest
from delay_proxy import DelayProxy, Faults

BODY = bytes(range(256)) * 500
PROMPT = Faults(delay_ms=0, jitter_ms=0)


class _Echo(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(b"short" if self.path == "/short" else BODY)

    def do_HEAD(self) -> None:
        self._answer(BODY, says=False)

    def do_PUT(self) -> None:
        self._answer(self.rfile.read(int(self.headers["Content-Length"])))

    def _answer(self, body: bytes, says: bool = True) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if says:
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        return


class _Server(ThreadingHTTPServer):
    daemon_threads = False  # so that ``server_close`` waits for them
    request_queue_size = 64

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", port), _Echo)
        self.open: list[socket.socket] = []

    def process_request(self, request: Any, client_address: Any) -> None:
        self.open.append(request)
        super().process_request(request, client_address)

    def handle_error(self, *_: Any) -> None:
        return  # a connection that the proxy has cut

    def hang_up(self) -> None:
        """Close all connections, as a server that ends."""
        for connection in self.open:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:  # closed already
                continue


@contextmanager
def _serving(port: int = 0) -> Iterator[int]:
    with _Server(port) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()
        server.hang_up()


@pytest.fixture
def server() -> Iterator[int]:
    with _serving() as port:
        yield port


@pytest.fixture
def ask() -> Iterator[Callable[..., tuple[Any, bytes]]]:
    """Sends a request; the answer's status and body, or the error's name.  One connection for each port."""
    kept: dict[int, http.client.HTTPConnection] = {}

    def asked(port: int, method: str = "GET", body: bytes | None = None, at: str = "/x") -> tuple[Any, bytes]:
        connection = kept.setdefault(port, http.client.HTTPConnection("127.0.0.1", port, timeout=60))
        try:
            connection.request(method, at, body)
            answer = connection.getresponse()
            return answer.status, answer.read()
        except (http.client.HTTPException, OSError) as error:
            connection.close()
            return type(error).__name__, b""

    yield asked
    for connection in kept.values():
        connection.close()


def test_what_passes_is_the_same(server: int, ask: Any) -> None:
    with DelayProxy(server, PROMPT) as proxy:
        assert ask(proxy.port) == (200, BODY)
        assert ask(proxy.port, "HEAD") == (200, b"")
        for size in (0, 1, 65536, 1 << 22):
            body = (BODY * 40)[:size]
            assert ask(proxy.port, "PUT", body) == (200, body)
        counts = proxy.counts()
    assert (counts.connections, counts.requests, counts.busy, counts.cut, counts.stalled) == (1, 6, 0, 0, 0)
    assert counts.received > len(BODY) + (1 << 22) and counts.cpu_s > 0


@pytest.mark.parametrize(
    ("status", "code"), [(503, b"SlowDown"), (500, b"InternalError"), (429, b"TooManyRequests")]
)
def test_a_busy_server(status: int, code: bytes, server: int, ask: Any) -> None:
    with DelayProxy(server, Faults(0, 0, busy=1, status=status)) as proxy:
        for _ in range(2):
            said, body = ask(proxy.port)
            assert said == status and b"<Code>" + code + b"</Code>" in body
        assert ask(proxy.port, "HEAD") == (status, b"")
        assert ask(proxy.port, "PUT", b"what is written") == (200, b"what is written")
        proxy.change(busy=0)
        assert ask(proxy.port) == (200, BODY)
        counts = proxy.counts()
    assert (counts.connections, counts.requests, counts.busy) == (1, 5, 3)


def test_cut_answers(server: int, ask: Any) -> None:
    with DelayProxy(server, Faults(0, 0, cut=1, cut_after=1000)) as proxy:
        for _ in range(3):
            assert ask(proxy.port)[0] in ("IncompleteRead", "ConnectionResetError")
        assert ask(proxy.port, at="/short") == (200, b"short")
        proxy.change(cut=0)
        assert ask(proxy.port) == (200, BODY)
        assert proxy.counts().cut == 3


def test_stalled_answers(ask: Any) -> None:
    with _serving() as server, DelayProxy(server, Faults(0, 0, stall=1, cut_after=1000)) as proxy:
        with socket.create_connection(("127.0.0.1", proxy.port), 60) as client:
            client.sendall(b"GET /x HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            said = b""
            while len(said) < 1000:
                said += client.recv(1 << 16)
            assert len(said) == 1000
            while proxy.counts().received < len(BODY):  # all of it has come to the proxy
                pass
            assert ask(proxy.port, at="/short") == (200, b"short")
            assert proxy.change(stall=0).stalled == 1
            assert ask(proxy.port) == (200, BODY)
            client.setblocking(False)
            with pytest.raises(BlockingIOError):  # neither more of it nor an end
                client.recv(1)


def test_it_ends_with_its_parent(server: int) -> None:
    code = f"""
import sys
sys.path.insert(0, {str(Path(delay_proxy.__file__).parent)!r})
from delay_proxy import DelayProxy
with DelayProxy({server}) as proxy:
    print(proxy.port, flush=True)
    input()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None and parent.stderr is not None
        port = int(parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)
        assert parent.stderr.read() == b""  # which the proxy has, too, until it ends
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 60)
