"""Which file systems are relied on, from what the kernel writes about mounts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fastpipe.core.file_identity import FileSystems

MOUNTS = r"""22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 22 0:40 / /data rw,relatime shared:2 master:1 - nfs4 server:/data rw
31 22 0:41 / /data/fast rw - btrfs /dev/vdb rw
32 22 0:42 / /with\040blank rw - fuse.sshfs host: rw
33 22 0:43 / /over rw - tmpfs tmpfs rw
34 22 0:44 / /over rw - 9p host rw
a line of another kind
35 22 strange:1 / /odd rw - xfs /dev/vdc rw
"""


@pytest.mark.parametrize(
    ("device", "folder", "kind"),
    [
        (os.makedev(254, 0), "/data/x", "ext4"),  # the device decides, whatever the path looks like
        (os.makedev(0, 40), "/", "nfs4"),
        (os.makedev(0, 99), "/data/fast/subvolume", "btrfs"),
        (os.makedev(0, 99), "/data/fastest", "nfs4"),
        (os.makedev(0, 99), "/data", "nfs4"),
        (os.makedev(0, 99), "/with blank/x", "fuse.sshfs"),
        (os.makedev(0, 99), "/over/x", "9p"),  # hides the tmpfs
        (os.makedev(0, 99), "/elsewhere", "ext4"),
        (os.makedev(0, 99), "/odd/x", "xfs"),
    ],
)
def test_the_kind_of_a_folders_file_system(device: int, folder: str, kind: str) -> None:
    systems = FileSystems(MOUNTS)
    assert systems.kind(device, folder) == kind
    assert systems.is_local(device, folder) == (kind in ("ext4", "btrfs", "xfs"))
    assert systems.is_remote(device, folder) == (kind in ("nfs4", "fuse.sshfs", "9p"))


def test_the_path_is_followed_to_where_it_leads(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    real = os.path.realpath(tmp_path / "real")
    systems = FileSystems(f"1 1 0:1 / / rw - ext4 x rw\n2 1 0:2 / {real} rw - nfs x rw\n")
    assert systems.kind(os.makedev(0, 99), str(tmp_path / "link")) == "nfs"


def test_what_nobody_tells_is_neither_local_nor_remote() -> None:
    systems = FileSystems("")
    assert systems.kind(1, "/") is None
    assert not systems.is_local(1, "/")
    assert not systems.is_remote(1, "/")


@pytest.mark.skipif(not os.path.exists("/proc/self/mountinfo"), reason="run it on Linux")
def test_this_machine_tells() -> None:
    assert FileSystems().kind(os.stat("/proc").st_dev, "/proc") == "proc"
    assert FileSystems().is_remote(os.stat("/proc").st_dev, "/proc")


def test_without_a_list_of_mounts_nothing_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("fastpipe.core.file_identity._MOUNTS", str(tmp_path / "none"))
    assert FileSystems().kind(os.stat("/").st_dev, "/") is None
