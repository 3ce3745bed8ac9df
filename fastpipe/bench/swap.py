"""The case ``swap``: short training scripts, before and after an exchange of one to three lines.

The scripts are in ``examples/swapped/``.  A comment ``# becomes: LINE`` at the end of a line has the line
that replaces it.  Each script has ``make_loader(folder)``, which returns the loader that the training
iterates over.  If a trainer makes or wraps the loader, it is the trainer's.  Scripts that need data of their
own also have ``make_data(photos, folder)``, which writes it.  ``IN_ANY_ORDER = True`` says that the swap
changes the order of the samples, which are then compared without it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar

import numpy as np

from fastpipe.bench.check import Outcome
from fastpipe.bench.data import Photos
from fastpipe.bench.driver import DATA_HELP, Case, add_run_arguments
from fastpipe.bench.images import photos_to_use
from fastpipe.bench.results import RowInfo
from fastpipe.bench.runner import Contender, ContenderError, Session
from fastpipe.console import Progress
from fastpipe.core.extras import require
from fastpipe.core.text import counted
from fastpipe.errors import FastpipeError, OptionError

SCRIPTS = Path(__file__).resolve().parents[2] / "examples" / "swapped"
_MARK = "  # becomes: "
_LEAST_PHOTOS = 600  # files of an epoch; photos of a small folder come several times


def scripts() -> list[Path]:
    """Return the scripts, by name.

    Raises:
        OptionError: there are none, because fastpipe was installed without its repository.
    """
    found = sorted(SCRIPTS.glob("*.py"))
    if not found:
        raise OptionError("the case 'swap' runs the scripts of examples/swapped in a clone of the repository")
    return found


def swapped(source: str) -> str:
    """Return the source of a script after the swap.

    >>> swapped("import a  # becomes: import b\\nimport c")
    'import b\\nimport c'
    """
    lines = (line.partition(_MARK)[2] or line for line in source.split("\n"))
    return "\n".join(lines)


def module_of(path: Path, source: str, name: str) -> types.ModuleType:
    """Run the source of a script as a module, in which worker processes find the script's classes.

    Raises:
        ContenderError: a package that the script imports is not installed.
    """
    module = types.ModuleType(name)
    sys.modules[name] = module
    try:
        exec(compile(source, str(path), "exec"), module.__dict__)
    except ModuleNotFoundError as error:
        raise ContenderError(f"{error.name} is not installed: pip install {error.name}") from error
    return module


class ScriptRow(Contender):
    """Measures epochs of a script's loader (a `Contender`)."""

    def __init__(self, key: str, loader: Any, in_any_order: bool) -> None:
        self.key, self.loader, self.workers = key, loader, loader.num_workers
        self.in_any_order = in_any_order
        self.chunk = len(loader.dataset)

    def measure(self, count: int) -> float:
        start = perf_counter()
        for _ in range(count // self.chunk):
            for _ in self.loader:
                pass
        return perf_counter() - start

    def close(self) -> None:
        self.loader = None


@dataclass
class Equality(Outcome):
    """Compares an epoch of each script before and after the swap, with the same seed of torch."""

    told: ClassVar[tuple[str, ...]] = ("scripts", "batches")

    whose: str = "the scripts' before the swap"
    scripts: int = 0
    batches: int = 0
    problems: tuple[str, ...] = ()

    def agreement(self) -> str:
        return f"all {self.batches:,} batches of {self.scripts} scripts equal {self.whose}, bit for bit"

    def add(self, name: str, before: Any, after: Any) -> None:
        self.scripts += 1
        for number, (expected, found) in enumerate(zip(before, after, strict=True)):
            self.batches += 1
            if not same(expected, found):
                self.problems += (f"{name}: batch {number} differs",)
                return


def same(a: Any, b: Any) -> bool:
    """Return whether two batches have the same types, shapes, dtypes and bits."""
    torch = require("torch", extra="torch")
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        is_alike = a.dtype == b.dtype and a.shape == b.shape
        return is_alike and bool(a.cpu().numpy().tobytes() == b.cpu().numpy().tobytes())
    if isinstance(a, Mapping):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(np.array_equal(a, b))


def _samples(epoch: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    """Return the samples of batches, which are sequences of tensors."""
    return [sample for batch in epoch for sample in zip(*batch, strict=True)]


def _bits(sample: tuple[Any, ...]) -> bytes:
    return b"".join(part.cpu().numpy().tobytes() for part in sample)


class Bench(Case):
    case = "swap"
    about = "scripts of the usual shapes, before and after an exchange of one to three lines"
    usual_rounds = 5
    photos: Photos

    def __init__(self, args: argparse.Namespace, progress: Progress) -> None:
        super().__init__(args, progress)
        self.sections: dict[str, dict[str, str]] = {}

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("--only", metavar="NAME,…", help="some of the scripts in examples/swapped (default: all of them)")
        add("--data", metavar="FOLDER", type=Path, help=f"image folder, one sub-folder per class{DATA_HELP}")
        add_run_arguments(parser, cls.usual_rounds, has_peers=False)

    def prepare(self) -> None:
        self.photos = photos_to_use(self)
        self.folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory(prefix="fastpipe-swap-")))
        images, files = self.folder / "photos", [Path(file) for file in self.photos.files]
        for number in range(-(-_LEAST_PHOTOS // len(files))):
            for place, (label, file) in enumerate(zip(self.photos.labels, files, strict=True)):
                # The scripts look for this ending.  Files of one class may have the same name.
                link = images / f"{label:04}" / f"{number}-{place}.jpg"
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(file.resolve())

    def rows(self) -> Sequence[Contender]:
        rows = [row for path in self._chosen() for row in self._rows_of(path)]
        if not rows:
            raise FastpipeError("; ".join(f"{miss['label']}: {miss['why']}" for miss in self.missing))
        return rows

    def _chosen(self) -> Iterator[Path]:
        wanted = set(self.args.only.split(",")) if self.args.only else None
        paths = scripts()
        if unknown := (wanted or set()) - {path.stem for path in paths}:
            names = ", ".join(path.stem for path in paths)
            raise OptionError(f"--only: there is no script {', '.join(sorted(unknown))}, only {names}")
        return (path for path in paths if wanted is None or path.stem in wanted)

    def _rows_of(self, path: Path) -> list[Contender]:
        name, source = path.stem, path.read_text()
        about = source.split('"""')[1].rstrip(".")
        folder = self.folder / "photos"
        try:
            before, after = (
                module_of(path, text, f"fastpipe_swapped_{name}_{side}")
                for side, text in (("before", source), ("after", swapped(source)))
            )
        except ContenderError as error:
            self.miss(name, about, str(error))
            return []
        if hasattr(before, "make_data"):
            folder = self.folder / name
            folder.mkdir()
            before.make_data(self.photos.files, folder)
        self.sections[name] = {"label": about}
        lines = counted(source.count(_MARK), "line")
        found: list[Contender] = []
        for module, group, label in (
            (before, "replaced", "as it was"),
            (after, "fastpipe", f"with {lines} exchanged"),
        ):
            info = RowInfo(f"{name}-{group}", label, group, section=name, unit="samples")
            found += self.opened([(info, partial(self._row, info.key, module, folder))])
        return found

    @staticmethod
    def _row(key: str, module: Any, folder: Path) -> ScriptRow:
        return ScriptRow(key, module.make_loader(folder), getattr(module, "IN_ANY_ORDER", False))

    def compared(self, rows: Sequence[Any]) -> Outcome:
        torch, check = require("torch", extra="torch"), Equality()
        for before, after in zip(rows[::2], rows[1::2], strict=True):
            epochs = []
            for row in (before, after):
                torch.manual_seed(0)
                epochs.append(list(row.loader))
            if before.in_any_order:
                epochs = [[sorted(_samples(epoch), key=_bits)] for epoch in epochs]
            check.add(before.key.removesuffix("-replaced"), *epochs)
        return check

    def content(self, session: Session, check: Outcome, **fields: Any) -> dict[str, Any]:
        result = super().content(session, check, **fields)
        found = sorted(row["ratio"]["median"] for row in result["rows"] if row["group"] == "fastpipe")
        count, span = counted(len(found), "script"), f"{found[0]:.2f} to {found[-1]:.2f}"
        result["verdict"] = f"After the swap, the loaders of {count} are {span} times as fast."
        return result

    def described(self, session: Session) -> dict[str, Any]:
        self.main = next(key for key, info in self.infos.items() if info.group == "fastpipe")
        text = f"{self.photos.name}, some of them several times in an epoch; scripts with other data make it"
        return {
            "data": {"text": text, "name": self.photos.name, "samples": 0, "sample_bytes": 0},
            "job": {
                "text": "scripts in examples/swapped, two worker processes, before and after the swap",
                "short": "scripts before and after a swap of one to three lines",
                "batch_size": 0, "replaces": "script",
            },
            "sections": self.sections,
        }  # fmt: skip
