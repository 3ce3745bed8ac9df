"""The case ``augment``: its options, its rows, its result."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Console

from fastpipe._extras import require
from fastpipe.bench import machine
from fastpipe.bench.augment.check import calls_that_wait, check_chains
from fastpipe.bench.augment.data import Batches, made_batches
from fastpipe.bench.augment.loading import LOADED, loader_rows
from fastpipe.bench.augment.peers import AUGMENT_PEERS, AugmentChild, AugmentPeer, TaskRow, wanted_of
from fastpipe.bench.augment.recipes import RECIPES, SINGLE, chain_of
from fastpipe.bench.augment.rows import Place, own_rows
from fastpipe.bench.augment.single import single_of
from fastpipe.bench.augment.targets import targets
from fastpipe.console import positive
from fastpipe.bench.data import Photos, folder_to_use, scan
from fastpipe.bench.driver import Driver, add_run_arguments
from fastpipe.bench.peers import interpreter
from fastpipe.bench.results import entries, rate_of, verdict
from fastpipe.bench.runner import Contender, ContenderError
from fastpipe.console import Progress

__all__ = ["add_arguments", "run"]

BATCH, QUICK_BATCH = 64, 4
# Of a measurement of a single operation, of which there are many.
SINGLE_S = 0.15


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the case."""
    add = parser.add_argument
    add("--data", metavar="FOLDER", help="image folder whose photos are augmented (default: "
        "$FASTPIPE_PHOTOS, else photograph-like JPEGs made once into the user's cache folder)")  # fmt: skip
    add("--batch-size", type=positive(int), metavar="N",
        help=f"samples in a batch (default: {BATCH}, with --quick {QUICK_BATCH})")  # fmt: skip
    add("--recipe", action="append", choices=[one.key for one in RECIPES], metavar="NAME",
        help="only this, and single operations on the same: " + ", ".join(one.key for one in RECIPES)
        + "; may be given again (default: all, and from files)")  # fmt: skip
    add("--no-single", action="store_true", help="leave single operations out, which are most of the rows")
    add_run_arguments(parser, "kornia, albumentations, torchaudio, batchgeneratorsv2 and MONAI")


def run(args: argparse.Namespace, console: Console, progress: Progress) -> int:
    """Measure, report, and write what was asked for.

    Returns:
        0, or 1 when images are not those of torchvision's functions.

    Raises:
        OptionError: the photos cannot be used.
    """
    folder, name, _ = folder_to_use(args.data, progress.done)
    photos = scan(folder, name)
    size = args.batch_size or (QUICK_BATCH if args.quick else BATCH)
    batches = made_batches(folder, name, size)
    devices = ["cpu"]
    if require("torch", extra="torch").cuda.is_available():
        devices.append("cuda")
    bench = _Bench(args, machine.cores_allowed(), progress, batches=batches, photos=photos, devices=devices)
    return bench.run(console)


@dataclass
class _Bench(Driver):
    """One run of the case."""

    case: ClassVar[str] = "augment"
    batches: Batches = field(kw_only=True)
    photos: Photos = field(kw_only=True)
    devices: Sequence[str] = field(kw_only=True)

    def __post_init__(self) -> None:
        asked = self.args.recipe
        recipes = [one for one in RECIPES if not asked or one.key in asked]
        units = {one.unit for one in recipes}
        single = [] if self.args.no_single else [one for one in SINGLE if not asked or one.unit in units]
        self.places, self.single = (
            [Place(one, dtype, device) for device in self.devices for one in kind for dtype in one.dtypes]
            for kind in (recipes, single)
        )
        self.loaded = () if asked else LOADED
        self.main = f"{self.places[0].key}-batch"

    def result(self) -> dict[str, Any] | None:
        """Check, measure, and put the file's content together; ``None`` if the check fails."""
        busy, every = self.begin(), [*self.places, *self.single]
        check = check_chains(every, self.batches, self.progress.now)
        self.progress.done(f"check: {check.sentence()}")
        if not check.ok:
            return None
        waiting = self._waiting(every)
        with ExitStack() as stack:
            children = self._children(stack, every)
            contenders = [row for place in every for row in self._rows(place, children, stack)]
            contenders += self._loaders(stack)
            session = self.measure(contenders)
        sections = {*(place.key for place in self.places), *(one.key for one in self.loaded)}
        rows = entries([info for info in self.infos.values() if info.section in sections], session)
        result = self._facts(busy) | {
            "method": {**self.method(session.rounds), "single_s": SINGLE_S},
            "check": {**check.as_json(), "waiting": waiting},
            "main": self.main,
            "rows": rows,
            "best": _best(rows),
            "missing": self.missing,
            "stages": {"seconds": {}, "images": 0},
            "floor_share": None,
            "plan": str(chain_of(self.places[0].recipe, "float32")),
            "single": single_of(self.single, self.infos, session.samples, self.batches.count),
            "targets": targets(session.samples, waiting, self.args.recipe or ()),
        }
        result["verdict"] = verdict(result)
        return result

    def seconds_of(self, contender: Contender) -> float:
        """Single operations are measured for less long."""
        seconds = super().seconds_of(contender)
        return min(seconds, SINGLE_S) if contender.key.startswith("op-") else seconds

    def _waiting(self, places: Sequence[Place]) -> list[str] | None:
        """Calls on CUDA that keep the host waiting; None where there is no CUDA."""
        if "cuda" not in self.devices:
            self.miss("cuda", "on CUDA", "torch finds no CUDA device")
            return None
        found = calls_that_wait(places, self.batches, self.progress.now)
        for text in found:
            self.warnings.append(f"a call waits for the device: {text}")
        self.progress.done(f"check: {len(found)} chains on CUDA keep the host waiting")
        return found

    def _rows(
        self, place: Place, children: Sequence[tuple[AugmentPeer, AugmentChild]], stack: ExitStack
    ) -> list[Contender]:
        """All rows of a recipe."""
        found: list[Contender] = []
        for info, row in own_rows(place, self.batches):
            stack.callback(row.close)
            self.infos[info.key] = info
            found.append(row)
        for peer, child in children:
            if peer.does(place):
                info = child.told(peer.info(place))
                self.infos[info.key] = info
                found.append(TaskRow(info.key, child, place.task, self.batches.count(place.recipe.unit)))
        return found

    def _loaders(self, stack: ExitStack) -> list[Contender]:
        """The rows from files."""
        size, found = len(self.batches), []
        for loaded in self.loaded:
            for info, make in loader_rows(loaded, self.photos, size, self.cores):
                if (row := self.open(stack, info, make)) is not None:
                    found.append(row)
        return found

    def _children(self, stack: ExitStack, places: list[Place]) -> list[tuple[AugmentPeer, AugmentChild]]:
        """Start the peers; one that is not there is noted, and what one lacks."""
        if not self.args.peers:
            return []
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fastpipe-bench-")))
        files, found = self.batches.save(folder), []
        for peer in AUGMENT_PEERS:
            if (child := self._child(peer, files, wanted_of(peer, places))) is not None:
                stack.callback(child.close)
                found.append((peer, child))
                for recipe, why in (peer.lacks or {}).items():
                    self.miss(f"{recipe}-{peer.peer.key}", f"{recipe}: {peer.peer.label}", why)
        return found

    def _child(self, peer: AugmentPeer, files: Mapping[str, str], places: list[Place]) -> AugmentChild | None:
        """The process of a peer, or ``None``."""
        one, python = peer.peer, interpreter(peer.peer)
        if not places:
            return None
        if python is None:
            self.miss(one.key, one.label, f"not installed: {one.install}")
            return None
        self.progress.now(f"starting {one.label}")
        try:
            return AugmentChild(peer, python, files, places, len(self.batches), self.cores)
        except ContenderError as error:
            self.miss(one.key, one.label, str(error))
            return None

    def _facts(self, busy: float | None) -> dict[str, Any]:
        """What was run, when, on what."""
        args, size = self.args, len(self.batches)
        words = [f"--data {Path(args.data).resolve().name}"] if args.data else []
        words += [f"--batch-size {size}"] if args.batch_size else []
        words += [f"--recipe {one}" for one in args.recipe or ()]
        words += ["--no-single"] if args.no_single else []
        counts = sorted({self.batches.count(place.recipe.unit) for place in self.places})
        of = " or ".join(map(str, counts))
        return self.facts(words, busy) | {
            "data": {"text": self.batches.text, "name": self.batches.name, "samples": size},
            "sections": {
                **{place.key: {"label": place.label} for place in self.places},
                **{loaded.key: {"label": loaded.label} for loaded in self.loaded},
            },
            "job": {
                "text": f"augmentation of batches of {of}: recipes, from decoded samples to a model's input",
                "short": f"augmentation of batches of {of}",
                "batch_size": size,
                "replaces": "transform",
            },
        }


def _best(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Section → the faster of the rows that are replaced."""
    best: dict[str, str] = {}
    replaced = [entry for entry in rows if entry["group"] == "replaced"]
    for entry in sorted(replaced, key=lambda entry: rate_of(entry)["median"]):
        best[entry["section"]] = entry["key"]
    return best
