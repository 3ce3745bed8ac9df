"""An S3 server with buckets, for tests and benchmarks: one that is started here, or one that is there.

What is started is Ceph's gateway, its monitor and one OSD, on loopback.  They end with the process that started
them, however that ends.  They need Debian's packages ``radosgw ceph-mon ceph-osd ceph-common``, and root, as whom
Ceph's programs run without further ado.  What is stored is in memory, and gone with the server.  Settings:
https://docs.ceph.com/en/latest/radosgw/config-ref/ and .../rados/configuration/.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

from delay_proxy import DelayProxy, Faults

from fastpipe.core.extras import require

_PROGRAMS = ("setpriv", "ceph", "ceph-mon", "ceph-osd", "monmaptool", "radosgw", "radosgw-admin")
_HOST = "127.0.0.1"
_PATIENCE_S = 60.0
_POLL_S = 0.05

# Messages between Ceph's own programs are checked by sums, not encrypted, and there are no keys.  Without
# tcp_nodelay an answer waits for the acknowledgement of the packet before it: 40 ms.
_CONFIGURATION = """
[global]
fsid = {fsid}
mon initial members = a
mon host = v2:{host}:{monitor}/0
public addr = {host}
cluster addr = {host}
ms bind msgr1 = false
ms bind ipv6 = false
auth cluster required = none
auth service required = none
auth client required = none
ms mon client mode = crc
ms mon cluster mode = crc
ms mon service mode = crc
keyring = {folder}/keyring
run dir = {folder}/run
admin socket = {folder}/run/$name.$pid.asok
log file = {folder}/log/$name.log
crash dir = {folder}/log
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 4
osd pool default pgp num = 4
osd pool default pg autoscale mode = off
mon allow pool size one = true
mon max pg per osd = 1000
mon data avail warn = 2
mon data avail crit = 1
paxos propose interval = 0.05
paxos min wait = 0.02
rgw rados pool pg num min = 4
[mon]
mon data = {folder}/mon
[osd]
osd data = {folder}/osd
osd objectstore = memstore
osd class update on start = false
osd crush initial weight = 1
osd memory target = 939524096
memstore device bytes = 2147483648
[client]
rgw data = {folder}/rgw
rgw frontends = beast endpoint={host}:{port} tcp_nodelay=1
rgw run sync thread = false
rgw enable usage log = false
rgw enable ops log = false
"""


def missing_programs() -> str:
    """Why there can be no server on this machine, and what to do; empty where there can."""
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"no {missing[0]}: apt-get install radosgw ceph-mon ceph-osd ceph-common"
    return "" if os.geteuid() == 0 else "Ceph's programs want to be run by root"


class S3Server:
    """A server of one user, from ``__enter__`` to ``__exit__``; some megabytes of it are in an empty folder.

    Where it does not start, the RuntimeError has the end of the log.
    """

    access_key, secret_key = "fastpipe", "not-a-secret"

    def __init__(self, folder: Path) -> None:
        self._folder, self._configuration = folder, folder / "ceph.conf"
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        # The kernel ends a program with the thread that started it, which is not to be one that ends earlier.
        self._starter = ThreadPoolExecutor(1, "fastpipe-s3")
        self.port = 0

    @property
    def endpoint(self) -> str:
        return f"http://{_HOST}:{self.port}"

    def __enter__(self) -> S3Server:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in reversed(list(self._running)):
            self._end(name, signal.SIGKILL)  # what it has is not wanted any more
        self._starter.shutdown()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._running.values()]

    def stop_gateway(self, *, kill: bool = False) -> None:
        """End the program that answers; what is stored stays.

        One that was killed is missed by the next for half a minute, in which new buckets wait.
        """
        self._end("gateway", signal.SIGKILL if kill else signal.SIGTERM)

    def start_gateway(self) -> None:
        self._run("gateway", "radosgw", "-n", "client.rgw.a", "-f")
        self._await("gateway", self._answers)

    def _start(self) -> None:
        for name in ("mon", "osd", "run", "log", "rgw"):
            (self._folder / name).mkdir()
        (self._folder / "keyring").touch()
        self.port, monitor = _free_ports(2)
        fsid, places = str(uuid.uuid4()), {"host": _HOST, "monitor": monitor, "port": self.port}
        self._configuration.write_text(_CONFIGURATION.format(fsid=fsid, folder=self._folder, **places))
        monitors = str(self._folder / "monmap")
        self._do("monmaptool", "--create", "--addv", "a", f"[v2:{_HOST}:{monitor}]", "--fsid", fsid, monitors)
        self._do("ceph-mon", "-i", "a", "--mkfs", "--monmap", monitors)
        self._run("monitor", "ceph-mon", "-i", "a", "-f")
        osd = str(uuid.uuid4())
        self._do("ceph", "--connect-timeout", "30", "osd", "new", osd)
        self._do("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd)
        self._run("osd", "ceph-osd", "-i", "0", "-f")
        self._await("osd", lambda: b"1 up" in self._do("ceph", "osd", "stat"))
        self._do(
            "radosgw-admin", "-n", "client.rgw.a", "user", "create", "--uid", "test",
            "--display-name", "test", "--access-key", self.access_key, "--secret-key", self.secret_key,
        )  # fmt: skip
        self.start_gateway()

    def _do(self, program: str, *arguments: str) -> bytes:
        command = [program, *arguments]
        if program != "monmaptool":
            command[1:1] = ["-c", str(self._configuration)]
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_PATIENCE_S, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.decode(errors='replace')[-500:]}")
        return done.stdout

    def _run(self, name: str, program: str, *arguments: str) -> None:
        with (self._folder / "log" / f"{name}.out").open("ab") as log:
            command = [program, "-c", str(self._configuration), *arguments]
            self._running[name] = self._starter.submit(_start_bound, command, log).result()

    def _await(self, name: str, is_ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while not is_ready():
            ended = self._running[name].poll()
            if ended is not None or time.monotonic() > deadline:
                said = (self._folder / "log" / f"{name}.out").read_text(errors="replace")[-500:]
                how = "does not answer" if ended is None else f"ended with {ended}"
                raise RuntimeError(f"the S3 server's {name} {how}: {said}")
            time.sleep(_POLL_S)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(self.endpoint, timeout=_PATIENCE_S):
                return True
        except (urllib.error.URLError, OSError):
            return False

    def _end(self, name: str, number: int = signal.SIGTERM) -> None:
        process = self._running.pop(name, None)
        if process is None:
            return
        process.send_signal(number)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _start_bound(command: list[str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start a program that ends with the thread that calls this."""
    return subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", *command],
        stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
    )  # fmt: skip


def _free_ports(count: int) -> Sequence[int]:
    """Ports that nobody listens on just now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind((_HOST, 0))
        return [int(one.getsockname()[1]) for one in sockets]


_ENDPOINT = "FASTPIPE_S3_ENDPOINT"


class S3Missing(Exception):  # noqa: N818 - a state of the machine
    """There is no server, and none can be started; the message says what to do."""


class S3Proxy(DelayProxy):
    """A proxy before the server, with the ``storage_options`` through it."""

    def __init__(self, port: int, faults: Faults, options: Mapping[str, Any]) -> None:
        super().__init__(port, faults)
        self.options: dict[str, Any] = dict(options)

    def __enter__(self) -> S3Proxy:
        super().__enter__()
        self.options["endpoint_url"] = f"http://127.0.0.1:{self.port}"
        return self


class S3:
    """A server, from ``__enter__``, which may raise ``S3Missing``, to ``__exit__``.

    ``$FASTPIPE_S3_ENDPOINT`` names one that is there already (``http://host:port``; with AWS_ACCESS_KEY_ID
    and AWS_SECRET_ACCESS_KEY); else Ceph's programs are started, where this machine has them.

    Attributes:
        options: ``storage_options`` as s3fs takes them.
        server, folder: the server, and where it has files, if it was started here; else None, and empty.
    """

    def __init__(self) -> None:
        self.server: S3Server | None = None
        self.endpoint = os.environ.get(_ENDPOINT, "").rstrip("/")
        self.options: dict[str, Any] = {}
        self.folder = ""
        self._names = itertools.count()
        self._stack = ExitStack()

    def __enter__(self) -> S3:
        with ExitStack() as stack:
            key, secret = os.environ.get("AWS_ACCESS_KEY_ID"), os.environ.get("AWS_SECRET_ACCESS_KEY")
            if not self.endpoint:
                if missing := missing_programs():
                    raise S3Missing(f"{missing}; or name a server by ${_ENDPOINT}")
                self.folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="fastpipe-s3-"))
                self.server = stack.enter_context(S3Server(Path(self.folder)))
                self.endpoint = self.server.endpoint
                key, secret = self.server.access_key, self.server.secret_key
            self.options = {"key": key, "secret": secret, "endpoint_url": self.endpoint}
            system = require("s3fs", extra="s3").S3FileSystem
            self._fs = system(**self.options, skip_instance_cache=True)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def port(self) -> int:
        return int(self.endpoint.rpartition(":")[2])

    @property
    def pids(self) -> list[int]:
        """The processes that were started here."""
        return [] if self.server is None else self.server.pids

    def bucket(self) -> str:
        """The name of a new bucket."""
        name = f"fastpipe-{uuid.uuid4().hex[:8]}-{next(self._names)}"
        self._fs.call_s3("create_bucket", Bucket=name)
        return name

    def put(self, bucket: str, key: str, data: bytes) -> None:
        self._fs.call_s3("put_object", Bucket=bucket, Key=key, Body=data)

    def delete(self, bucket: str, key: str) -> None:
        self._fs.call_s3("delete_object", Bucket=bucket, Key=key)

    def keys(self, bucket: str) -> list[str]:
        """The keys of a bucket, up to a thousand."""
        found = self._fs.call_s3("list_objects_v2", Bucket=bucket).get("Contents", [])
        return [one["Key"] for one in found]

    def proxy(self, faults: Faults) -> S3Proxy:
        return S3Proxy(self.port, faults, self.options)
