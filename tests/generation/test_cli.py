"""``fastpipe generate``."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest

from fastpipe.cli import main

_MODULE = """
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
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for name in ("scenes_of_test", "broken_of_test"):
        sys.modules.pop(name, None)


def command(words: str) -> int:
    return main(["generate", *words.split()])


def test_a_function_of_a_module_in_this_folder_makes_a_file(capfd: pytest.CaptureFixture) -> None:
    words = "scenes_of_test:sample -n {} --out x.h5 --seed 7 --workers 1"
    for rows, shown in ((40, "x.h5: 40 rows"), (40, "all there already"), (50, "50 rows")):
        assert command(words.format(rows)) == 0
        assert shown in capfd.readouterr().err
    with h5py.File("x.h5") as file:
        assert np.array_equal(file["x"][9], np.random.default_rng([7, 9]).normal(size=3))


def test_a_dry_run_says_how_long_and_makes_nothing(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    assert command("scenes_of_test:sample -n 100000 --dry-run --threads") == 0
    shown = capfd.readouterr().out
    assert "100,000 rows will take" in shown and "workers:" in shown
    assert not list(tmp_path.glob("*.h5*"))


def test_a_function_of_a_class_makes_several_files(tmp_path: Path) -> None:
    assert command("scenes_of_test:Scenes.draw -n 40 --out x.h5 --max-bytes 160B --workers 0") == 0
    assert len(list(tmp_path.glob("x-0*.h5"))) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [("scenes_of_test:sample -n 4", "--out is missing: name the file"),
     ("scenes_of_test -n 4", "name a function as MODULE:FUNCTION"),
     ("scenes_of_test:other -n 4", "has no 'other'"), ("scenes_of_test:number -n 4", "is no function: 3"),
     ("no_such_module:sample -n 4", "there is no module 'no_such_module'"),
     ("scenes_of_test:raises -n 9 --out x.h5 --workers 0", "row 5 failed: ValueError: no scene")],
)  # fmt: skip
def test_an_error_is_one_line(words: str, message: str, capfd: pytest.CaptureFixture) -> None:
    assert command(words) == 2
    error = capfd.readouterr().err
    assert message in error and "Traceback" not in error


def test_an_error_about_an_unfinished_file_names_the_options_to_continue(
    tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    words = "scenes_of_test:raises -n 9 --out {} --workers 0"
    for out in ("kept.h5", "again.h5"):
        assert command(words.format(out)) == 2
    (tmp_path / "scenes_of_test.py").write_text(_MODULE.replace("index == 5", "index == 50"))
    del sys.modules["scenes_of_test"]
    importlib.invalidate_caches()
    capfd.readouterr()
    assert command(words.format("kept.h5")) == 2
    assert "resume=False (--no-resume)" in (shown := capfd.readouterr().err)
    assert "resume='changed' (--resume-changed)" in shown
    for out, option in (("kept.h5", "--resume-changed"), ("again.h5", "--no-resume")):
        assert command(f"{words.format(out)} {option}") == 0
        with h5py.File(out) as file:
            assert file["x"][:].tolist() == list(range(9))


def test_a_module_that_lacks_another_says_which() -> None:
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_not_there"):
        command("broken_of_test:sample -n 4 --out x.h5")
