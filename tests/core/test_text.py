"""Names from files reach no terminal, log or page as they are."""

from __future__ import annotations

import io
import logging
import os
import pickle
import re
import subprocess
import sys
import traceback
from pathlib import Path

import h5py
import numpy as np
import pytest
from rich.console import Console

import fastpipe
from fastpipe import FastHDF5Dataset, FastImageFolder, FastLoader, FastPatchDataset, errors
from fastpipe.bench import page as pages
from fastpipe.cli import main
from fastpipe.console import PlainTable, Progress, in_any_encoding, print_line
from fastpipe.core.class_folders import find_classes
from fastpipe.core.text import printable, printable_lines
from fastpipe.generation.schedule import Report
from fastpipe.sampling import Grid
from fastpipe.tools.epochs import Bars

BAD = list(map(chr, [*range(32), *range(127, 160)]))
BAD += "\xad\u061c\u200b\u200c\u200d\u200e\u200f\u2028\u2029\u202a\u202b\u202c\u202d\u202e\u2060"
BAD += "\u2066\u2067\u2068\u2069\ufeff\ud800\udcff\udfff\U000e0041"
GOOD = ["a b", " x ", "Müller", "Mu\u0308ller", "猫 犬", "日本\u3000語", "🚀", "👩‍🚀", "🏳️‍🌈", "❤️"]
GOOD += ["שלום", "مرحبا", "a\xa0b", "[x]{y}%s\\n<&>$"]
NASTY = "x\x1b]0;title\x07\x1b[31m\x9b1m\u202e\udcff\nfastpipe: all is well[/red][bold]"
KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]


def is_clean(text: str) -> bool:
    """Whether nothing of ``NASTY`` is in a text as it was."""
    return not any(one in text for one in "\x1b\x07\x9b\u202e\udcff") and "\nfastpipe: all" not in text


def test_characters_that_a_terminal_acts_on_are_escaped() -> None:
    for one in BAD:
        shown = printable(f"a{one}b")
        assert shown.isascii() and shown.isprintable() and shown[:2] == "a\\" and shown[-1] == "b"
        assert printable(shown) == shown


def test_readable_names_stay_as_they_are() -> None:
    for name in GOOD:
        assert printable(name) == name
        assert printable_lines(f"{name}\n{name}") == f"{name}\n{name}"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_errors_are_printable(kind: type[Exception]) -> None:
    error = kind(f"{NASTY}: what is wrong")
    for one in (error, pickle.loads(pickle.dumps(error))):
        text = "".join(traceback.format_exception_only(type(one), one))
        assert is_clean(text.replace("\nfastpipe", "fastpipe") if kind is errors.WorkerError else text)
        text.encode()
    assert error.args == (f"{NASTY}: what is wrong",)
    assert str(errors.WorkerError("it died\nIts stack:\n\x1b")) == "it died\nIts stack:\n\\x1b"


def test_errors_of_readers_are_printable(tmp_path: Path) -> None:
    folder = tmp_path / NASTY.replace("/", "")
    folder.mkdir()
    (folder / "c").mkdir()
    (folder / "c" / "1.png").write_bytes(b"x")
    (folder / "x.h5").write_bytes(b"x")
    with h5py.File(folder / "y.h5", "w") as file:
        file["a\x1b[31m"] = np.zeros(3)
    for make in (
        lambda: FastImageFolder(folder)[0], lambda: FastImageFolder(folder / "c"), lambda: find_classes(folder / "c"),
        lambda: FastHDF5Dataset(folder / "x.h5", "x"), lambda: FastHDF5Dataset(folder / "y.h5", "x"),
        lambda: FastHDF5Dataset(folder / "none.h5", "x"), lambda: FastPatchDataset(f"{folder}/y.h5/x", (2,)),
        lambda: FastPatchDataset(f"{folder}/x.h5", (2,)), lambda: FastPatchDataset(f"{folder}/c", (2,)),
    ):  # fmt: skip
        with pytest.raises((OSError, KeyError, ValueError)) as failed:
            make()
        assert is_clean(str(failed.value))
        assert failed.type.__module__ == "builtins" or isinstance(failed.value, errors.FastpipeError)


def test_datasets_and_plans_are_printable(tmp_path: Path, photo_tree: Path) -> None:
    folder = tmp_path / NASTY.replace("/", "")
    folder.symlink_to(photo_tree)
    path = os.fspath(tmp_path / "a\x1b\nfastpipe: all.h5")
    with h5py.File(path, "w") as file:
        file["a\x1b[31m\nfastpipe: all"] = np.zeros((4, 4))
    key = "a\x1b[31m\nfastpipe: all"
    images, rows = FastImageFolder(folder), FastHDF5Dataset(path, key)
    patches = FastPatchDataset(f"{path}/{key}", (2, 2), sampling=Grid())
    for dataset in (images, rows, patches):
        for one in (dataset, dataset.plan, FastLoader(dataset, batch_size=2).plan):
            # torchvision's repr has a folder's name over lines, as its own lines.
            text = repr(one).replace("\nfastpipe", "fastpipe") if dataset is images else repr(one)
            assert is_clean(text)


def test_every_logger_prints_names_escaped() -> None:
    names = set()
    for path in Path(fastpipe.__file__).parent.rglob("*.py"):
        names |= set(re.findall(r"getLogger\(\s*([^)]*)\)", path.read_text(encoding="utf-8")))
    literal = {name.strip('"') for name in names if name.startswith('"')}
    assert len(literal) > 5 and {name for name in names if not name.startswith(('"', 'f"'))} == set()
    for name in literal:
        record = logging.LogRecord(
            name, logging.INFO, "", 0, "%s of %s: %d, %s", (NASTY, Path(NASTY), 3, OSError(NASTY)), None
        )
        assert logging.getLogger(name).filter(record)
        assert is_clean(record.getMessage()) and ": 3," in record.getMessage()


def test_tables_lines_and_moving_lines_are_plain_text() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, color_system=None, width=200)
    table = PlainTable(NASTY)
    table.add_column("x")
    table.add_row(NASTY)
    console.print(table)
    print_line(console, NASTY)
    with Progress(console) as progress:
        progress.now(NASTY)
        progress.done(NASTY)
    bars = Bars(console)
    bar = bars.begin(NASTY, 3)
    bars.show(bar, 1, NASTY)
    bars.end(bar)
    bars.print(NASTY)
    with Report(NASTY, 3, console=console) as report:
        report.step(NASTY)
        report.say(NASTY)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "[/red][bold]" in shown and shown.count("\\x1b") > 9
    assert not any(
        one in shown for one in ("\x1b]", "\x1b[31m", "\x07", "\x9b", "\u202e", "\udcff", "\nfastpipe")
    )


def test_pages_and_pictures_take_names_as_text() -> None:
    name = NASTY + "<script>alert('\"')</script>&"
    text = pages.document(name, [pages.table([name], [[name]]), pages.rect(0, 0, 1, 1, name)])
    assert is_clean(text) and "<script>" not in text and "alert('" not in text
    text.encode()


_ENCODINGS = """
import io, sys
from fastpipe.cli import main
for encoding in ("ascii", "latin-1", "utf-8"):
    sys.stdout = io.TextIOWrapper(io.BytesIO(), encoding)
    assert main(["inspect", sys.argv[1]]) == 0
    sys.stdout.flush()
    sys.__stdout__.buffer.write(sys.stdout.buffer.getvalue() + b"\\0")
"""


def test_any_encoding_of_the_output_will_do(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "猫.h5", "w") as file:
        file["猫\udcff".encode("utf-8", "replace")] = np.zeros((4, 4))
    command = [sys.executable, "-c", _ENCODINGS, os.fspath(tmp_path / "猫.h5")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "LC_ALL": "C"}
    ran = subprocess.run(command, capture_output=True, env=environment, check=False, timeout=100)
    assert ran.returncode == 0, ran.stderr
    shown = ran.stdout.split(b"\0")
    assert b"\\u732b" in shown[0] and b"\\u732b" in shown[1] and "猫".encode() in shown[2]
    before = sys.stdout.errors
    with in_any_encoding():
        pass
    assert sys.stdout.errors == before, "a script's own output is left as it was"


def test_wrong_arguments_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["inspect", "x", f"--{NASTY}"], ["inspect", "x", NASTY], [NASTY]):
        with pytest.raises(SystemExit):
            main(arguments)
        assert is_clean(capsys.readouterr().err)
