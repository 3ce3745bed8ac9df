"""The proxy passes on what a server says, late, and with the faults that were asked for."""

from __future__ import annotations

import http.client
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import delay_proxy
import pytest
from delay_proxy import DelayProxy, Faults

BODY = bytes(range(256)) * 500


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


@pytest.fixture
def server() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Echo) as serving:
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        yield serving.server_port
        serving.shutdown()
        thread.join()


def _asked(
    connection: http.client.HTTPConnection, method: str = "GET", body: bytes | None = None, at: str = "/x"
) -> tuple[int, bytes]:
    connection.request(method, at, body)
    answer = connection.getresponse()
    return answer.status, answer.read()


def test_what_passes_is_the_same_but_for_faults(server: int) -> None:
    with DelayProxy(server, Faults(0, 0, cut_after=1000)) as proxy:
        connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=60)
        assert _asked(connection) == (200, BODY) and _asked(connection, "HEAD") == (200, b"")
        for size in (0, 1, 65536, 1 << 22):
            body = (BODY * 40)[:size]
            assert _asked(connection, "PUT", body) == (200, body)
        counts = proxy.change(busy=1)
        assert (counts.connections, counts.requests, counts.busy, counts.cut) == (1, 6, 0, 0)
        assert counts.received > len(BODY) + (1 << 22) and counts.cpu_s > 0
        for _ in range(2):
            said, answer = _asked(connection)
            assert said == 503 and b"<Code>SlowDown</Code>" in answer
        assert _asked(connection, "HEAD") == (503, b"")
        assert _asked(connection, "PUT", b"what is written") == (200, b"what is written")
        counts = proxy.change(busy=0, cut=1)
        assert (counts.connections, counts.requests, counts.busy) == (1, 10, 3)
        for _ in range(3):
            with pytest.raises((http.client.IncompleteRead, ConnectionResetError)):
                _asked(connection)
            connection.close()
        assert _asked(connection, at="/short") == (200, b"short")
        assert proxy.change(cut=0).cut == 3
        assert _asked(connection) == (200, BODY)
        connection.close()


def test_it_ends_with_its_parent(server: int) -> None:
    code = f"""
import sys
sys.path.insert(0, {str(Path(delay_proxy.__file__).parent)!r})
from delay_proxy import DelayProxy
with DelayProxy({server}) as proxy:
    print(proxy.port, flush=True)
    input()
"""
    pipes: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as parent:
        port = int(parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)
        assert parent.stderr.read() == b""  # which the proxy has, too, until it ends
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 60)
