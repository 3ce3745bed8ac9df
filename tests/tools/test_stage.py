"""``fastpipe stage``: copies of a bucket's objects on a local disk."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from torchvision import transforms
from torchvision.datasets import ImageFolder

from fastpipe import Cache, FastImageFolder, Stage, Subset

URL = "memory://bucket/train"
TRANSFORM = transforms.Compose([transforms.Resize(40), transforms.CenterCrop(32), transforms.PILToTensor()])


@pytest.fixture
def objects(photo_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The tree's files as objects, and no listing that was kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    system = fsspec.filesystem("memory")
    for path in sorted(photo_tree.rglob("*.jpg")):
        system.pipe(f"/bucket/train/{path.relative_to(photo_tree)}", path.read_bytes())
    yield system
    system.rm("/bucket", recursive=True)


@pytest.fixture
def stage(command: Any) -> Any:
    """Runs the command; its exit code, and all that it prints."""

    def run(*arguments: object) -> tuple[int, str]:
        code, output, errors = command("stage", *arguments)
        return code, output + errors

    return run


def test_a_training_finds_the_files_of_the_stage(objects: Any, stage: Any, tmp_path: Path) -> None:
    code, text = stage(URL, tmp_path / "stage")
    dataset = FastImageFolder(URL, stage=tmp_path / "stage")
    assert code == 0 and f"{len(dataset)} images are staged; {len(dataset)} of them" in text
    assert dataset[0][0].size == dataset[len(dataset) - 1][0].size
    assert dataset.downloaded == (0, 0)
    dataset.close()
    code, text = stage(URL, tmp_path / "stage")
    assert code == 0 and "; 0 of them (0 B)" in text


def test_chosen_classes_are_staged(objects: Any, stage: Any, tmp_path: Path) -> None:
    dataset = FastImageFolder(URL)
    names = dataset.classes
    counts = [dataset.targets.count(number) for number in range(len(names))]
    dataset.close()
    _, text = stage(URL, tmp_path / "a", "--classes", f"{names[1]},{names[0]}")
    assert f"{counts[0] + counts[1]} images are staged" in text
    _, text = stage(URL, tmp_path / "b", "--subset", 2, "--seed", 7)
    drawn = Subset(2, 7).select(names)
    assert f"{sum(counts[names.index(name)] for name in drawn)} images are staged" in text


def test_a_stage_tells_its_status_and_is_cleared_when_it_is_not_in_use(
    objects: Any, stage: Any, tmp_path: Path
) -> None:
    assert stage("--status", tmp_path / "none")[0] == 2
    stage(URL, tmp_path / "stage")
    code, text = stage("--status", tmp_path / "stage")
    assert code == 0 and "24 objects" in text and "not in use" in text
    dataset = FastImageFolder(URL, stage=Stage(tmp_path / "stage"))
    dataset[0]
    assert "in use" in stage("--status", tmp_path / "stage")[1]
    code, text = stage("--clear", tmp_path / "stage")
    assert code == 2 and "in use" in text
    dataset.close()
    del dataset
    assert stage("--clear", tmp_path / "stage")[0] == 0
    assert " 0 objects" in stage("--status", tmp_path / "stage")[1]


def test_objects_that_cannot_be_copied_are_named(objects: Any, stage: Any, tmp_path: Path) -> None:
    dataset = FastImageFolder(URL)  # lists them
    gone = dataset.samples[3][0]
    dataset.close()
    objects.rm(gone.split("memory:/")[1])
    code, text = stage(URL, tmp_path / "stage")
    assert code == 1 and f"not staged: {gone}" in text and "23 images are staged" in text
    assert stage(URL, tmp_path / "stage", "--refresh")[0] == 0


def test_wrong_arguments_are_refused(objects: Any, stage: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments, message in (
        ((URL,), "name a URL"),
        (("--status", URL, "x"), "folder alone"),
        ((URL, "x", "--max-bytes", "10K"), "max_bytes"),
        ((URL, "x", "--classes", "no-such"), "no-such"),
        ((URL, "x", "--form", "pixels", "--connections", "3"), "--connections is for a stage"),
        (("/no/folder", "x"), "/no/folder/ is not there"),
    ):
        code, text = stage(*arguments)
        assert code == 2 and message in text


@pytest.mark.parametrize("form", ["pixels", "coefficients", "index"])
def test_a_cache_is_filled_ahead_of_a_training(
    photo_tree: Path, objects: Any, stage: Any, tmp_path: Path, form: Any, settled: Any
) -> None:
    """From a local folder, or a bucket, whose images are not fetched again then."""
    settled(photo_tree)
    count = len(FastImageFolder(photo_tree))
    for place in (photo_tree, URL):
        folder = tmp_path / Path(place).name
        for kept in (count, 0):  # the same command goes on where it was stopped
            code, text = stage(place, folder, "--form", form)
            assert code == 0 and f"{kept} of {count} images were decoded and kept" in text
            assert f"; {count} are there" in text
        dataset = FastImageFolder(place, TRANSFORM, cache=Cache("disk", dir=folder))
        for (image, target), (expected, wanted) in zip(
            dataset, ImageFolder(photo_tree, TRANSFORM), strict=True
        ):
            assert torch.equal(image, expected) and target == wanted
        is_read = place == URL and form == "index"  # which is used with its file
        assert dataset.downloaded[0] == (count if is_read else 0)
        dataset.close()


def test_images_that_do_not_fit_are_said(photo_tree: Path, stage: Any, tmp_path: Path, settled: Any) -> None:
    settled(photo_tree)
    folder = tmp_path / "cache"
    code, text = stage(photo_tree, folder, "--form", "pixels", "--max-bytes", "500kB")
    assert (
        code == 1 and "accepts no more images (it may hold 500,000 bytes)" in text and "--max-bytes" in text
    )
    code, text = stage("--status", folder)
    assert code == 2 and "holds a cache" in text


def test_images_that_cannot_be_read_are_not_kept(photo_tree: Path, stage: Any, tmp_path: Path) -> None:
    tree = shutil.copytree(photo_tree, tmp_path / "tree")
    next(tree.glob("class_000/*.jpg")).write_bytes(b"no image")
    code, text = stage(tree, tmp_path / "cache", "--form", "coefficients")
    assert code == 1 and "1 images cannot be read: fastpipe scan names them" in text


def test_verify_repairs_damaged_files(
    s3: Any, photo_tree: Path, stage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3.options["key"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.options["secret"])
    bucket = s3.bucket()
    for path in sorted(photo_tree.glob("class_000/*")):
        s3.put(bucket, f"train/class_000/{path.name}", path.read_bytes())
    arguments = (f"s3://{bucket}/train", tmp_path / "stage", "--endpoint-url", s3.endpoint, "--verify")
    code, text = stage(*arguments)
    assert code == 0 and "verified: 0 of them" in text
    files = sorted(path for path in (tmp_path / "stage").rglob("*") if path.parent.parent.name == "objects")
    whole = [path.read_bytes() for path in files]
    files[0].write_bytes(bytes(len(whole[0])))  # of the same length
    files[1].write_bytes(whole[1][:-1])
    code, text = stage(*arguments)
    assert code == 0 and "verified: 2 of them were damaged" in text
    assert [path.read_bytes() for path in files] == whole
