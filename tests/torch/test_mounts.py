"""Datasets over a bucket that is mounted as a folder: by s3fs-fuse, which reads like a slow disk."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import mounts
import numpy as np
import pytest
import torch
from mounts import Mount, missing_for_mounts, rclone_mount, s3fs_mount
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder

from fastpipe import FastHDF5Dataset, FastImageFolder, FastLoader, Stage
from fastpipe.errors import BadSampleError, StoreError

pytestmark = pytest.mark.usefixtures("same_generators", "own_cache_folder")

STEADY = v1.Compose([v1.Resize(20), v1.CenterCrop(16), v1.ToTensor()])
_PROGRAMS = {"s3fs": s3fs_mount, "rclone": rclone_mount}


@pytest.fixture(scope="module")
def bucket(s3: Any, photo_tree: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tree's files as objects, and a file of HDF5."""
    import h5py

    name: str = s3.bucket()
    table = tmp_path_factory.mktemp("table") / "table.h5"
    with h5py.File(table, "w") as file:
        file.create_dataset("values", data=np.arange(4000, dtype=np.float32).reshape(1000, 4), chunks=(64, 4))
    files = {f"train/{path.relative_to(photo_tree)}": path for path in photo_tree.rglob("*.jpg")}
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: s3.put(name, key, files[key].read_bytes()), files))
    s3.put(name, "table.h5", table.read_bytes())
    return name


@pytest.fixture
def mounting(s3: Any, bucket: str, tmp_path: Path) -> Callable[..., AbstractContextManager[Mount]]:
    """Mounts the bucket; options as of ``s3fs_mount``."""

    def mount(program: str = "s3fs", **options: Any) -> AbstractContextManager[Mount]:
        if missing := missing_for_mounts(program):
            pytest.skip(missing)
        (tmp_path / "mount").mkdir(exist_ok=True)
        given = {
            "endpoint": s3.endpoint, "bucket": bucket, "key": s3.options["key"],
            "secret": s3.options["secret"], "mountpoint": tmp_path / "mount", **options,
        }  # fmt: skip
        return _PROGRAMS[program](**given)

    return mount


@pytest.fixture
def mounted(mounting: Any) -> Iterator[Mount]:
    """The bucket as a folder, by s3fs-fuse."""
    with mounting() as mount:
        yield mount


def _epoch(dataset: Any) -> tuple[torch.Tensor, torch.Tensor]:
    batches = [(images.clone(), labels.clone()) for images, labels in FastLoader(dataset, 5)]
    images, labels = zip(*batches, strict=True)
    return torch.cat(images), torch.cat(labels)


def _stock(root: Path) -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = zip(*ImageFolder(root, STEADY), strict=True)
    return torch.stack(images), torch.tensor(labels)


def _assert_same(ours: Any, theirs: Any) -> None:
    assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])


def _is_mounted(path: Path) -> bool:
    return f" {path} " in Path("/proc/self/mountinfo").read_text()


# ---- datasets -------------------------------------------------------------------------------


def test_a_mounted_folder_has_the_samples_of_torchvision(mounted: Mount, photo_tree: Path) -> None:
    root = mounted.path / "train"
    dataset, stock = FastImageFolder(root, STEADY), ImageFolder(root)
    assert list(dataset.samples) == stock.samples and dataset.classes == stock.classes
    expected = _stock(root)
    _assert_same(_epoch(dataset), expected)
    _assert_same(_stock(photo_tree), expected)
    dataset.close()


def test_what_is_staged_is_not_read_from_the_mount_again(mounting: Any, tmp_path: Path) -> None:
    with mounting() as mount:
        root = mount.path / "train"
        expected = _stock(root)
        dataset = FastImageFolder(root, STEADY, stage=Stage(tmp_path / "stage"), cache="off")
        assert list(dataset.samples) == ImageFolder(root).samples
        _assert_same(_epoch(dataset), expected)
        assert dataset.downloaded[0] == len(dataset)
    assert not os.path.exists(root)  # from now on there is the stage alone
    _assert_same(_epoch(dataset), expected)
    assert dataset.downloaded[0] == len(dataset)
    dataset.close()


@pytest.mark.parametrize("staged", [False, True])
def test_an_image_of_a_mount_that_is_gone_is_named(staged: bool, mounting: Any, tmp_path: Path) -> None:
    with mounting() as mount:
        root = mount.path / "train"
        stage = {"stage": Stage(tmp_path / "stage")} if staged else {}
        dataset = FastImageFolder(root, STEADY, cache="off", **stage)
    # With a stage it is known that each was there: then none of them is a bad sample.
    kind, words = (StoreError, "Is it still mounted") if staged else (BadSampleError, "FileNotFoundError")
    with pytest.raises(kind, match=words) as error:
        _epoch(dataset)
    assert str(dataset.samples[0][0]) in str(error.value)
    dataset.close()


@pytest.mark.parametrize("staged", [False, True])
def test_an_image_of_a_mount_whose_program_was_killed_is_named(
    staged: bool, mounting: Any, tmp_path: Path
) -> None:
    with mounting() as mount:
        stage = {"stage": Stage(tmp_path / "stage")} if staged else {}
        dataset = FastImageFolder(mount.path / "train", STEADY, cache="off", **stage)
        os.kill(mount.pid, signal.SIGKILL)
        with pytest.raises(OSError, match=r"not connected|abort") as error:
            _epoch(dataset)
        assert str(dataset.samples[0][0]) in str(error.value)
        dataset.close()
    assert not _is_mounted(mount.path)


@pytest.mark.parametrize("staged", [False, True])
def test_a_folder_that_is_not_mounted_is_named(staged: bool, tmp_path: Path) -> None:
    (tmp_path / "mount").mkdir()
    for root in (tmp_path / "mount", tmp_path / "mount" / "train"):  # empty; not there
        with pytest.raises(FileNotFoundError, match=str(root)):
            FastImageFolder(root, STEADY, **({"stage": Stage(tmp_path / "stage")} if staged else {}))


def test_rows_of_a_mounted_file(mounted: Mount) -> None:
    dataset = FastHDF5Dataset(mounted.path / "table.h5", "values")
    rows = torch.cat([batch.clone() for batch in FastLoader(dataset, 100)])
    assert torch.equal(rows, torch.arange(4000, dtype=torch.float32).reshape(1000, 4))
    del dataset  # which has the file open


# ---- mounts ---------------------------------------------------------------------------------


@pytest.mark.parametrize("program", sorted(_PROGRAMS))
def test_a_mount_ends_also_where_a_file_is_open(
    program: str, mounting: Any, photo_tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_CA_BUNDLE", "/missing")
    with mounting(program) as mount:
        content = {path.relative_to(mount.path / "train"): path for path in mount.path.rglob("*.jpg")}
        assert content and all(
            path.read_bytes() == (photo_tree / name).read_bytes() for name, path in content.items()
        )
        assert _is_mounted(mount.path)
        while mount.cpu_seconds() == 0:  # what it counts is ticks of the clock
            os.listdir(mount.path / "train")
        with pytest.raises(RuntimeError, match="is a mount already"):
            mounting(program).__enter__()
        file = open(mount.path / "table.h5", "rb")  # noqa: SIM115
    assert not _is_mounted(mount.path) and not os.path.exists(f"/proc/{mount.pid}")
    assert mount.cpu_seconds() == 0
    mount.unmount()
    with pytest.raises(OSError, match="not connected"):
        file.close()


@pytest.mark.parametrize("program", sorted(_PROGRAMS))
def test_a_mount_whose_program_was_killed_is_removed(program: str, mounting: Any) -> None:
    with mounting(program) as mount:
        os.kill(mount.pid, signal.SIGKILL)
    assert not _is_mounted(mount.path)
    assert list(mount.path.iterdir()) == []


def test_why_there_is_no_mount_is_said(mounting: Any, s3: Any, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)has not mounted .*bucket or key not found") as error:
        mounting(bucket="missing").__enter__()
    assert s3.options["secret"] not in str(error.value)
    with pytest.raises(RuntimeError, match="invalid credentials") as error:
        mounting(secret="hush").__enter__()
    assert "hush" not in str(error.value)
    assert not _is_mounted(tmp_path / "mount")


def test_a_program_that_mounts_nothing_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if missing := missing_for_mounts("s3fs"):
        pytest.skip(missing)
    program = tmp_path / "bin" / "s3fs"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho one moment\nexec tail -f /dev/null\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(mounts, "_PATIENCE_S", 0.2)
    with pytest.raises(RuntimeError, match=r"has not mounted .*: (one moment|it says nothing)$"):
        s3fs_mount("http://127.0.0.1:9", "x", "key", "secret", tmp_path / "mount").__enter__()


_OWN = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(Path(mounts.__file__).parent)!r})
from mounts import s3fs_mount
with s3fs_mount(*sys.argv[1:5], Path(sys.argv[5])) as mount:
    print(mount.pid, flush=True)
    sys.stdin.readline()
"""


def test_a_mount_ends_with_the_process_that_made_it(
    mounting: Any, s3: Any, bucket: str, tmp_path: Path
) -> None:
    with mounting():
        pass  # or the test is skipped
    given = [s3.endpoint, bucket, s3.options["key"], s3.options["secret"], str(tmp_path / "mount")]
    with subprocess.Popen(
        [sys.executable, "-c", _OWN, *given], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as owner:
        assert owner.stdout is not None
        handle = os.pidfd_open(int(owner.stdout.readline()))
        assert _is_mounted(tmp_path / "mount")
        owner.kill()
    select.select([handle], [], [])  # ``hang_guard`` ends it
    os.close(handle)
    assert not _is_mounted(tmp_path / "mount")


def test_what_is_missing_is_said_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert "apt-get install s3fs fuse3" in missing_for_mounts("s3fs")
    monkeypatch.setattr(mounts.shutil, "which", lambda name: name)
    monkeypatch.setattr("builtins.open", _refuse)
    assert "--device /dev/fuse" in missing_for_mounts("s3fs")


def _refuse(*_: Any, **__: Any) -> Any:
    raise PermissionError(1, "Operation not permitted")
