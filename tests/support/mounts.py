"""A bucket as a folder, for tests and benchmarks: mounted by s3fs-fuse or by rclone, to read.

Both end with the thread that started them, however that ends, and so does the mount.  Credentials are in
their environment, and in no file.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

_PATIENCE_S, _END_S, _POLL_S = 30.0, 5.0, 0.02

# Of scripts that read each image once in an epoch: nothing is kept, and nothing asked twice.
_RCLONE = (
    "--read-only", "--vfs-cache-mode", "off", "--buffer-size", "0", "--no-modtime", "--no-checksum",
    "--dir-cache-time", "1h", "--attr-timeout", "1h", "--vfs-read-wait", "0", "--use-server-modtime",
)  # fmt: skip


class Mount:
    """A bucket that a program has mounted at a path."""

    def __init__(self, path: Path, process: subprocess.Popen[bytes]) -> None:
        self.path, self.pid = path, process.pid
        self._process, self._is_there = process, True

    def cpu_seconds(self) -> float:
        """Of the program so far; 0 after its end."""
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def unmount(self) -> None:
        """End it, also where files there are open; may be called twice."""
        if not self._is_there:
            return
        self._is_there = False
        self._detach()
        self._process.terminate()  # it would stay as long as a file is open
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            self._detach()

    def _detach(self) -> None:
        # Whether or not it is there, which cannot be asked without its program: that may have been killed.
        subprocess.run([_unmounter(), "-u", "-z", str(self.path)], capture_output=True, check=False)


def missing_for_mounts(program: str) -> str:
    """Why ``"s3fs"`` or ``"rclone"`` cannot mount on this machine, and what to do; empty where it can."""
    for name in (program, _unmounter(), "setpriv"):
        if shutil.which(name) is None:
            return f"no {name}: apt-get install {program} fuse3 util-linux"
    try:
        with open("/dev/fuse", "r+b", buffering=0):
            return ""
    except OSError as error:
        why = f"no /dev/fuse ({error.strerror})"
        return f"{why}: run it where FUSE is allowed (docker run --device /dev/fuse)"


def _unmounter() -> str:
    return "fusermount" if shutil.which("fusermount3") is None else "fusermount3"


@contextlib.contextmanager
def s3fs_mount(
    endpoint: str, bucket: str, key: str, secret: str, mountpoint: Path, options: Sequence[str] = ()
) -> Iterator[Mount]:
    """A bucket mounted by s3fs-fuse at an empty folder, with further options as of ``s3fs -o``.

    Where it cannot be, the RuntimeError has the end of what the program says.
    """
    settings = ",".join([f"url={endpoint}", "use_path_request_style", "ro", *options])
    environment = {"AWSACCESSKEYID": key, "AWSSECRETACCESSKEY": secret}
    with _mounted("s3fs", [bucket, str(mountpoint), "-f", "-o", settings], environment, mountpoint) as mount:
        yield mount


@contextlib.contextmanager
def rclone_mount(
    endpoint: str, bucket: str, key: str, secret: str, mountpoint: Path, options: Sequence[str] = _RCLONE
) -> Iterator[Mount]:
    """A bucket mounted by rclone; errors as of ``s3fs_mount``, but to mount it asks no server.

    The default options of ``rclone mount`` are those with which it reads whole small files fastest.
    """
    settings = {
        "TYPE": "s3", "PROVIDER": "Ceph", "REGION": "us-east-1", "LIST_VERSION": "2", "ACCESS_KEY_ID": key,
        "SECRET_ACCESS_KEY": secret, "ENDPOINT": endpoint,
    }  # fmt: skip
    environment = {f"RCLONE_CONFIG_X_{name}": value for name, value in settings.items()}
    arguments = ["mount", f"x:{bucket}", str(mountpoint), *options]
    with _mounted("rclone", arguments, environment, mountpoint) as mount:
        yield mount


@contextlib.contextmanager
def _mounted(
    program: str, arguments: Sequence[str], environment: Mapping[str, str], mountpoint: Path
) -> Iterator[Mount]:
    if missing := missing_for_mounts(program):
        raise RuntimeError(missing)
    if os.path.ismount(mountpoint):
        raise RuntimeError(f"{mountpoint} is a mount already: unmount it, or name another folder")
    # With some of these rclone refuses to start, and s3fs would use another's session.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("AWS")}
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "TERM", program, *arguments],
            stdin=subprocess.DEVNULL, stdout=said, stderr=said, env={**inherited, **environment},
            start_new_session=True,
        )  # fmt: skip
        mount = Mount(mountpoint, process)
        try:
            deadline = time.monotonic() + _PATIENCE_S
            while not os.path.ismount(mountpoint):
                if process.poll() is not None or time.monotonic() > deadline:
                    said.seek(0)
                    words = said.read().decode(errors="replace").strip()[-500:] or "it says nothing"
                    raise RuntimeError(f"{program} has not mounted {mountpoint}: {words}")
                time.sleep(_POLL_S)
            yield mount
        finally:
            mount.unmount()
