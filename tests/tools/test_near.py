"""Folders on file systems that answer from elsewhere: measured on copies nearby."""

from __future__ import annotations

import os
import select
import tempfile
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import default_loader
from torchvision.transforms import Compose, RandomResizedCrop, ToTensor

import fastpipe
from fastpipe.tools import swaps as near
from fastpipe.tools.costs import LoaderCosts
from fastpipe.tools.folders import FileSystem
from fastpipe.tools.loaders import Watched
from fastpipe.tools.loops import Loop
from fastpipe.tools.stacks import Line
from fastpipe.tools.thread_times import Spent

SMALL = Compose([RandomResizedCrop(16), ToTensor()])
WAITING = LoaderCosts({"read": Spent(9_000_000, 0, 0), "decode": Spent(1_000_000, 1_000_000, 0)}, batches=4)
WORKING = LoaderCosts({"read": Spent(9_000_000, 9_000_000, 0)}, batches=4)


def far_loader(path: str) -> Any:
    """Reads as from a mount whose server answers late; what was copied is near."""
    if "fastpipe-profile-" not in path:
        select.select([], [], [], 0.01)
    return default_loader(path)


def watched(loader: Any) -> Watched:
    made_at, used_at = (Line("train.py", number, "main") for number in (3, 5))
    return Watched(loader, made_at, used_at, Loop(1.0, True))


def mounted(folder: Path, kind: str) -> str:
    device = os.stat(folder).st_dev
    return f"30 23 {os.major(device)}:{os.minor(device)} / {folder} rw - {kind} bucket rw\n"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where copies are made."""
    folder = tmp_path_factory.mktemp("made")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_copies_of_the_scripts_files_are_measured_and_gone_afterwards(photo_tree: Path, made: Path) -> None:
    dataset = ImageFolder(str(photo_tree), ToTensor(), loader=far_loader)
    loader = DataLoader(dataset, batch_size=1, shuffle=True)
    found = list(near.of_staged(watched(loader), WAITING, mounted(photo_tree, "fuse.s3fs")))
    assert len(found) == 1 and found[0].what.endswith("FastLoader (train.py:3 main)")
    assert 'stage="/a/local/disk"' in found[0].what and "90% of its time for fuse.s3fs" in found[0].why
    originals = {image.numpy().tobytes(): label for image, label in dataset}
    for _ in range(2):
        epoch = list(found[0].begin())
        assert len(epoch) == len(list(made.glob("*/*.jpg"))) == 8
        for images, labels in epoch:
            assert originals[images[0].numpy().tobytes()] == labels.item()
    found[0].close()
    assert not list(made.iterdir())
    assert dataset.samples[0][0].startswith(str(photo_tree)) and loader.dataset is dataset


@pytest.mark.parametrize(
    ("kind", "costs"), [("ext4", WAITING), ("fuse.s3fs", WORKING)], ids=["near", "hardly waits"]
)
def test_where_a_copy_would_not_help_there_is_none(photo_tree: Path, kind: str, costs: LoaderCosts) -> None:
    loader = DataLoader(ImageFolder(str(photo_tree), SMALL), batch_size=2)
    assert not list(near.of_staged(watched(loader), costs, mounted(photo_tree, kind)))


def test_what_is_no_folder_of_images_is_passed_over() -> None:
    loader: Any = DataLoader(range(10), batch_size=2)  # type: ignore[arg-type]
    assert not list(near.of_staged(watched(loader), WAITING))


def test_without_room_nothing_is_measured(
    photo_tree: Path, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(near, "_MOST_BYTES", 10)
    loader = DataLoader(ImageFolder(str(photo_tree), SMALL), batch_size=2)
    (found,) = near.of_staged(watched(loader), WAITING, mounted(photo_tree, "nfs4"))
    with pytest.raises(OSError, match=r"no room for 2 files in .*: .* are free"):
        next(found.begin())
    found.close()
    assert not list(made.iterdir())


@pytest.mark.slow
def test_a_profile_of_a_mount_says_to_copy(
    photo_tree: Path, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(near, "file_system", lambda path, mounts: FileSystem("fuse.rclone", 1 << 40))
    dataset = ImageFolder(str(photo_tree), SMALL, loader=far_loader)
    dataset.samples = dataset.imgs = dataset.samples * 20
    loader = DataLoader(dataset, batch_size=4)
    report = fastpipe.profile(loader, lambda batch: None, seconds=0.6, try_advice=True)
    found = next(one for one in report.advice if "stage=" in one.what)
    assert found.predicted_s is not None and found.predicted_s < report.step_s / 2
    assert found.tried_s is None or found.tried_s < report.step_s
    assert not list(made.iterdir())
