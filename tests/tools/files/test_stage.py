"""``fastpipe stage``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest

from fastpipe import FastImageFolder, Stage, Subset, cli

URL = "memory://bucket/train"


@pytest.fixture
def objects(photo_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The tree's files as objects, and no listing that was kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    system = fsspec.filesystem("memory")
    for path in sorted(photo_tree.rglob("*")):
        if path.is_file():
            system.pipe(f"/bucket/train/{path.relative_to(photo_tree)}", path.read_bytes())
    yield system
    system.rm("/bucket", recursive=True)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Runs the command; its exit code, and what it says."""

    def command(*arguments: object) -> tuple[int, str]:
        code = cli.main(["stage", *map(str, arguments)])
        said = capsys.readouterr()
        return code, said.out + said.err

    return command


def test_it_fills_a_stage_that_a_training_finds(objects: Any, run: Any, tmp_path: Path) -> None:
    code, said = run(URL, tmp_path / "stage")
    dataset = FastImageFolder(URL, stage=tmp_path / "stage")
    assert code == 0 and f"{len(dataset)} images are staged; {len(dataset)} of them" in said
    assert dataset[0][0].size == dataset[len(dataset) - 1][0].size
    assert dataset.downloaded == (0, 0)
    dataset.close()
    code, said = run(URL, tmp_path / "stage")
    assert code == 0 and "; 0 of them (0 B)" in said


def test_some_classes_only(objects: Any, run: Any, tmp_path: Path) -> None:
    whole = FastImageFolder(URL)
    names = whole.classes
    counts = [whole.targets.count(number) for number in range(len(names))]
    whole.close()
    _, said = run(URL, tmp_path / "a", "--classes", f"{names[1]},{names[0]}")
    assert f"{counts[0] + counts[1]} images are staged" in said
    _, said = run(URL, tmp_path / "b", "--subset", 2, "--seed", 7)
    drawn = Subset(2, 7).select(names)
    assert f"{sum(counts[names.index(name)] for name in drawn)} images are staged" in said


def test_status_and_clear(objects: Any, run: Any, tmp_path: Path) -> None:
    assert run("--status", tmp_path / "none")[0] == 2
    run(URL, tmp_path / "stage")
    code, said = run("--status", tmp_path / "stage")
    assert code == 0 and "24 objects" in said and "nobody" in said
    dataset = FastImageFolder(URL, stage=Stage(tmp_path / "stage"))
    dataset[0]
    assert "in use" in run("--status", tmp_path / "stage")[1]
    code, said = run("--clear", tmp_path / "stage")
    assert code == 2 and "in use" in said
    dataset.close()
    del dataset
    assert run("--clear", tmp_path / "stage")[0] == 0
    assert " 0 objects" in run("--status", tmp_path / "stage")[1]


def test_what_cannot_be_copied_is_named(objects: Any, run: Any, tmp_path: Path) -> None:
    dataset = FastImageFolder(URL)  # lists them
    gone = dataset.samples[3][0]
    dataset.close()
    objects.rm(gone.split("memory:/")[1])
    code, said = run(URL, tmp_path / "stage")
    assert code == 1 and f"not staged: {gone}" in said and "23 images are staged" in said
    assert run(URL, tmp_path / "stage", "--refresh")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((URL,), "name a URL"),
        (("--status", URL, "x"), "folder alone"),
        ((URL, "x", "--max-bytes", "10K"), "max_bytes"),
        ((URL, "x", "--classes", "no-such"), "no-such"),
        (("/no/folder", "x"), "/no/folder/ is not there"),
    ],
)
def test_what_cannot_work_is_said(
    arguments: tuple[str, ...],
    said: str,
    objects: Any,
    run: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, text = run(*arguments)
    assert code == 2 and said in text


def test_verify_finds_what_is_damaged(
    s3: Any, photo_tree: Path, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3.options["key"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.options["secret"])
    bucket = s3.bucket()
    for path in sorted(photo_tree.glob("class_000/*")):
        s3.put(bucket, f"train/class_000/{path.name}", path.read_bytes())
    arguments = (f"s3://{bucket}/train", tmp_path / "stage", "--endpoint-url", s3.endpoint, "--verify")
    code, said = run(*arguments)
    assert code == 0 and "verified: 0 of them" in said
    files = sorted(path for path in (tmp_path / "stage").rglob("*") if path.parent.parent.name == "objects")
    whole = [path.read_bytes() for path in files]
    files[0].write_bytes(bytes(len(whole[0])))  # of the same length
    files[1].write_bytes(whole[1][:-1])
    code, said = run(*arguments)
    assert code == 0 and "verified: 2 of them were damaged" in said
    assert [path.read_bytes() for path in files] == whole
