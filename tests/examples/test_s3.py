"""The example ``s3_imagenet``: both scripts learn the same, and differ by the swap alone."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from mounts import missing_for_mounts
from scripts import started

from fastpipe import Stage, Subset

EXAMPLE = "s3_imagenet"
_CLASSES = 3
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def few(scripts: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The scripts, for a few classes."""
    for name in ("before", "after"):
        monkeypatch.setattr(scripts[name], "CLASSES", _CLASSES)
    monkeypatch.setattr(scripts["after"], "STAGE", Stage(tmp_path / "stage"))
    return scripts


def _environment(options: dict[str, Any]) -> dict[str, str]:
    names = {"key": "ACCESS_KEY_ID", "secret": "SECRET_ACCESS_KEY", "endpoint_url": "ENDPOINT_URL"}
    return {f"AWS_{name}": options[option] for option, name in names.items()}


@pytest.mark.slow
def test_both_learn_the_same(
    s3: Any, few: Any, photo_tree: Path, tmp_path: Path, same_generators: None, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    bucket, folder = s3.bucket(), tmp_path / "train"
    for path in sorted(photo_tree.rglob("*.jpg"))[::3]:  # nearly all the time goes into the model
        copy = folder / path.relative_to(photo_tree)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
        s3.put(bucket, copy.relative_to(tmp_path).as_posix(), path.read_bytes())
    for name, value in _environment(s3.options).items():
        monkeypatch.setenv(name, value)
    losses = few["before"].main(str(folder), 2, plain=True)
    for root in (f"s3://{bucket}/train", str(folder)):  # the bucket, and a folder as where it is mounted
        assert few["after"].main(root, 2, plain=True) == pytest.approx(losses, abs=1e-5)
    assert len(losses) == 2 and losses[0] != losses[1]
    assert capsys.readouterr().out.count("ms a step for data") == 3
    staged = sum(file.stat().st_size for file in (tmp_path / "stage").rglob("*") if file.is_file())
    chosen = few["before"].choose(os.listdir(folder))
    assert staged >= sum(file.stat().st_size for name in chosen for file in (folder / name).iterdir())


def test_the_choice_of_classes_is_the_scripts_own(few: Any) -> None:
    names = [f"n{number:08d}" for number in range(20)]
    before, after = (few[name].choose(names) for name in ("before", "after"))
    assert before == after == sorted(set(after)) and len(after) == _CLASSES
    assert after != Subset(_CLASSES, few["after"].SEED).select(names)  # which draws otherwise


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
    script = Path(__file__).resolve().parents[2] / "examples" / EXAMPLE / "serve.py"
    given = script, "--classes", "3", "--per-class", "2", "--delay-ms", "1"
    own = {"FASTPIPE_S3_ENDPOINT": s3.endpoint, "TMPDIR": str(tmp_path)}
    with started(*given, env={**os.environ, **_environment(s3.options), **own}, stderr=None) as process:
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
