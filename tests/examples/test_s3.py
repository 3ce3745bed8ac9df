"""The example ``s3_imagenet``: both scripts learn the same, and differ by the swap alone."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from mounts import missing_for_mounts

from fastpipe import Stage, Subset

_FOLDER = Path(__file__).resolve().parents[2] / "examples" / "s3_imagenet"
_CLASSES = 3


@pytest.fixture
def scripts(example: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """The scripts, for a few classes."""
    with example("s3_imagenet") as modules:
        for name in ("before", "after"):
            monkeypatch.setattr(modules[name], "CLASSES", _CLASSES)
        monkeypatch.setattr(modules["after"], "STAGE", Stage(tmp_path / "stage"))
        yield modules


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """torch's threads wait for each other, which takes long where other work has the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _environment(options: dict[str, Any]) -> dict[str, str]:
    names = {
        "key": "AWS_ACCESS_KEY_ID",
        "secret": "AWS_SECRET_ACCESS_KEY",
        "endpoint_url": "AWS_ENDPOINT_URL",
    }
    return {name: options[option] for option, name in names.items()}


@pytest.mark.slow
def test_both_learn_the_same(
    s3: Any,
    scripts: Any,
    photo_tree: Path,
    tmp_path: Path,
    same_generators: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    bucket, folder = s3.bucket(), tmp_path / "train"
    for path in sorted(photo_tree.rglob("*.jpg"))[::3]:  # nearly all the time goes into the model
        copy = folder / path.relative_to(photo_tree)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
        s3.put(bucket, copy.relative_to(tmp_path).as_posix(), path.read_bytes())
    for name, value in _environment(s3.options).items():
        monkeypatch.setenv(name, value)
    losses = scripts["before"].main(str(folder), 2, plain=True)
    for root in (f"s3://{bucket}/train", str(folder)):  # the bucket, and a folder as where it is mounted
        assert scripts["after"].main(root, 2, plain=True) == pytest.approx(losses, abs=1e-5)
    assert len(losses) == 2 and losses[0] != losses[1]
    assert capsys.readouterr().out.count("ms a step for data") == 3
    staged = [file for file in (tmp_path / "stage").rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in staged) >= sum(
        file.stat().st_size for name in scripts["before"].choose(os.listdir(folder))
        for file in (folder / name).iterdir()
    )  # fmt: skip


def test_the_choice_of_classes_is_the_scripts_own(scripts: Any) -> None:
    names = [f"n{number:08d}" for number in range(20)]
    before, after = (scripts[name].choose(names) for name in ("before", "after"))
    assert before == after == sorted(set(after)) and len(after) == _CLASSES
    assert after != Subset(_CLASSES, scripts["after"].SEED).select(names)  # which draws otherwise


def _served(process: subprocess.Popen[str]) -> dict[str, str]:
    """What serve.py says, by what follows it."""
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if "after.py" in line:
            break
    return dict(re.findall(r"(AWS_\w+)=(\S+)", said) + re.findall(r"(before|after)\.py (\S+)", said))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_server_ends_and_leaves_nothing(number: int, s3: Any, tmp_path: Path) -> None:
    """It is given the tests' server, as a user may name one, and so prints no credentials."""
    command = [sys.executable, str(_FOLDER / "serve.py"), "--classes", "3", "--per-class", "2"]
    environment = {
        **os.environ, **_environment(s3.options), "FASTPIPE_S3_ENDPOINT": s3.endpoint, "TMPDIR": str(tmp_path)
    }  # fmt: skip
    with subprocess.Popen(
        [*command, "--delay-ms", "1"], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            found = _served(process)
            bucket = found["after"].split("/")[2]
            assert sorted(s3.keys(bucket)) == [
                f"train/n{label:08d}/{photo:04d}.jpg" for label in range(3) for photo in range(2)
            ]
            assert found["AWS_ENDPOINT_URL"] != s3.endpoint and "AWS_SECRET_ACCESS_KEY" not in found
            assert ("before" in found) == (not missing_for_mounts("s3fs"))
            if "before" in found:
                assert len([*Path(found["before"]).rglob("*.jpg")]) == 6
        finally:
            process.send_signal(number)
        assert process.stdout is not None and process.stdout.read() == "closed\n"
    assert process.returncode == 0
    assert list(tmp_path.iterdir()) == []
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()


def test_without_a_server_it_is_said_what_to_do(scripts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("FASTPIPE_S3_ENDPOINT", raising=False)
    with pytest.raises(SystemExit, match="apt-get install radosgw"):
        scripts["serve"].main()
