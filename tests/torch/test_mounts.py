"""Datasets over a bucket that is mounted as a folder: by s3fs-fuse, which reads like a slow disk."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mounts import Mount, missing_for_mounts, rclone_mount, s3fs_mount
from streams import plain
from torch.utils.data import default_collate
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder

from fastpipe import FastHDF5Dataset, FastImageFolder, FastLoader, Stage

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


def _epoch(dataset: Any) -> Any:
    batches = [plain(batch) for batch in FastLoader(dataset, len(dataset))]
    assert len(batches) == 1
    return batches[0]


def _stock(root: Path) -> Any:
    return plain(default_collate(list(ImageFolder(root, STEADY))))


def _is_mounted(path: Path) -> bool:
    return f" {path} " in Path("/proc/self/mountinfo").read_text()


def test_datasets_of_a_mount_have_the_samples_of_the_stock_ones(mounting: Any, photo_tree: Path) -> None:
    with mounting() as mount:
        root = mount.path / "train"
        dataset, stock = FastImageFolder(root, STEADY), ImageFolder(root)
        assert list(dataset.samples) == stock.samples and dataset.classes == stock.classes
        assert _epoch(dataset) == _stock(root) == _stock(photo_tree)
        dataset.close()
        rows = FastHDF5Dataset(mount.path / "table.h5", "values")
        batches = torch.cat([batch.clone() for batch in FastLoader(rows, 100)])
        assert torch.equal(batches, torch.arange(4000, dtype=torch.float32).reshape(1000, 4))
        del rows  # which has the file open


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


@pytest.mark.parametrize("program", sorted(_PROGRAMS))
def test_a_mount_ends_although_a_file_is_open(
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


def test_a_failed_mount_is_an_error_without_secrets(mounting: Any, s3: Any, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)has not mounted .*bucket or key not found") as error:
        mounting(bucket="missing").__enter__()
    assert s3.options["secret"] not in str(error.value)
    with pytest.raises(RuntimeError, match="invalid credentials") as error:
        mounting(secret="hush").__enter__()
    assert "hush" not in str(error.value)
    assert not _is_mounted(tmp_path / "mount")
