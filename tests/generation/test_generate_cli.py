"""``fastpipe generate``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest

from fastpipe.cli import main

_MODULE = """
import numpy as np

def sample(index, rng):
    return {"x": rng.normal(size=3), "index": index}

def raises(index, rng):
    if index == 5:
        raise ValueError("no scene")
    return {"x": index}

class Scenes:
    @staticmethod
    def draw(index, rng):
        return {"x": index}

number = 3
"""


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "scenes_of_test.py").write_text(_MODULE)
    (tmp_path / "broken_of_test.py").write_text("import a_module_that_is_not_there")
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    yield
    sys.path[:] = path
    for name in ("scenes_of_test", "broken_of_test"):
        sys.modules.pop(name, None)


def test_a_file_is_made_of_a_module_of_this_folder(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    words = [
        "generate",
        "scenes_of_test:sample",
        "-n",
        "40",
        "--out",
        "x.h5",
        "--seed",
        "7",
        "--workers",
        "2",
    ]
    assert main(words) == 0
    assert "x.h5: 40 rows" in capfd.readouterr().err
    with h5py.File("x.h5") as file:
        assert np.array_equal(file["x"][9], np.random.default_rng([7, 9]).normal(size=3))
    assert main(words) == 0
    assert "all there already" in capfd.readouterr().err
    assert main([*words[:3], "50", *words[4:]]) == 0
    assert "50 rows" in capfd.readouterr().err


def test_a_dry_run_says_how_long_and_makes_nothing(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    assert main(["generate", "scenes_of_test:sample", "-n", "100000", "--dry-run", "--threads"]) == 0
    told = capfd.readouterr().out
    assert "100,000 rows will take" in told and "workers:" in told
    assert not list(tmp_path.glob("*.h5*"))


def test_functions_of_classes_and_sizes(tmp_path: Path) -> None:
    words = [
        "generate",
        "scenes_of_test:Scenes.draw",
        "-n",
        "40",
        "--out",
        "x.h5",
        "--max-bytes",
        "160B",
        "--workers",
        "0",
    ]
    assert main(words) == 0
    assert len(list(tmp_path.glob("x-0*.h5"))) == 2


@pytest.mark.parametrize(
    ("words", "told"),
    [(["scenes_of_test:sample", "-n", "4"], "--out names the file"),
     (["scenes_of_test", "-n", "4"], "name a function as MODULE:FUNCTION"),
     (["scenes_of_test:other", "-n", "4"], "has no 'other'"),
     (["scenes_of_test:number", "-n", "4"], "is no function: 3"),
     (["no_such_module:sample", "-n", "4"], "there is no module 'no_such_module'"),
     (["scenes_of_test:raises", "-n", "9", "--out", "x.h5", "--workers", "0"], "row 5 failed: ValueError: no scene")],
)  # fmt: skip
def test_what_cannot_be_made_is_one_line(words: list[str], told: str, capfd: pytest.CaptureFixture) -> None:
    assert main(["generate", *words]) == 2
    error = capfd.readouterr().err
    assert told in error and "Traceback" not in error


def test_a_module_that_lacks_another_says_which(capfd: pytest.CaptureFixture) -> None:
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_not_there"):
        main(["generate", "broken_of_test:sample", "-n", "4", "--out", "x.h5"])
