"""Compare ``fastpipe.autotune`` with the best of all settings, measured one by one.

::

    python benchmarks/autotune.py --photos FOLDER --rounds 5 --json autotune.json

For loaders of images, rows of an HDF5 file and patches of a volume, three runs of ``autotune`` choose
settings; then these and every other combination are measured in turns, round by round.  Of many settings the
best is one that was lucky, too: so that one and the chosen ones are measured in as many rounds once more,
which alone decide.  A choice is near enough where it takes at most 5 % longer than the best one, or twice the
median deviation of either.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import tensorstore
from rounds import save_facts
from torch.utils.data import DataLoader, Dataset
from torchvision.datasets import ImageFolder
from torchvision.transforms import Compose, Normalize, RandomHorizontalFlip, RandomResizedCrop, ToTensor

import fastpipe
from fastpipe import FastHDF5Dataset, FastImageFolder, FastLoader, FastPatchDataset
from fastpipe.bench.synthetic import mel_rows, photo_tree
from fastpipe.core.machine import available_cpus
from fastpipe.sampling import Uniform
from fastpipe.tools.trials import Base, Settings, measure

_EACH_S, _RUNS, _IMAGES = 0.7, 3, 3200
_CROP = Compose([
    RandomResizedCrop(224), RandomHorizontalFlip(), ToTensor(),
    Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
])  # fmt: skip


class Rows(Dataset[Any]):
    """As many scripts have it: each worker opens the file, and reads row by row."""

    def __init__(self, path: str) -> None:
        self.path, self.file = path, None
        with h5py.File(path) as file:
            self.length = len(file["mels"])

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if self.file is None:
            self.file = h5py.File(self.path)
        return self.file["mels"][index]  # type: ignore[index]


def loaders(photos: Path, folder: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Loaders to be tuned, by name."""
    rng, path = np.random.default_rng(0), str(folder / "speech.h5")
    with h5py.File(path, "w") as file:
        rows = np.concatenate([mel_rows(rng, 1024)] * 8)
        file.create_dataset("mels", data=rows, chunks=(16, *rows.shape[1:]), compression="gzip", shuffle=True)
    spec = {
        "driver": "zarr3", "kvstore": {"driver": "file", "path": f"{folder}/scan.zarr/"},
        "metadata": {"shape": [192, 384, 384], "data_type": "uint16", "chunk_grid": {
            "name": "regular", "configuration": {"chunk_shape": [64, 128, 128]}}},
    }  # fmt: skip
    volume = rng.integers(0, 60, (192, 384, 384)).astype(np.uint16)
    tensorstore.open(spec, create=True).result().write(volume).result()

    def patches() -> Any:
        return FastPatchDataset(f"{folder}/scan.zarr", (48, 96, 96), sampling=Uniform(400), cache="off")

    yield (
        "ImageFolder, DataLoader of 1 worker",
        lambda: DataLoader(ImageFolder(str(photos), _CROP), 32, shuffle=True, num_workers=1),
    )
    yield (
        "FastImageFolder, FastLoader",
        lambda: FastLoader(FastImageFolder(photos, _CROP, cache="off"), 32, shuffle=True),
    )
    yield (
        "h5py row by row, DataLoader of 1 worker",
        lambda: DataLoader(Rows(path), 64, shuffle=True, num_workers=1),
    )
    yield (
        "FastHDF5Dataset, FastLoader",
        lambda: FastLoader(FastHDF5Dataset(path, "mels", cache="off"), 64, shuffle=True),
    )
    yield "FastPatchDataset, FastLoader", lambda: FastLoader(patches(), 2, shuffle=True)


def every(settings: Settings) -> list[Settings]:
    """All combinations, of those of a loader."""
    cores = available_cpus()
    aheads: list[Any] = ["auto", 1, 4]
    threads = [settings.threads] if settings.threads != "auto" else ["auto", 1, 2 * cores]
    backends = [settings.backend] if settings.backend != "auto" else ["auto", "simplejpeg", "pillow"]
    workers = sorted({0, 1, cores, 2 * cores})
    return [
        replace(settings, workers=number, ahead=ahead, threads=each, backend=backend)
        for number, ahead, each, backend in itertools.product(workers, aheads, threads, backends)
    ]


def timed(base: Base, settings: Settings) -> float:
    """Seconds of a batch."""
    with base.dataset_with(settings):
        found = measure(base.made(settings, for_trial=True), None, _EACH_S, max(2, settings.workers), None)
    assert found is not None
    return found.batch_s


def main() -> None:
    """Measure, print a table, and write everything as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--photos", type=Path, help="class folders of photographs (default: made ones)")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each setting (default: 5)")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each run of autotune (default: 30)")
    parser.add_argument("--json", type=Path, help="where to write everything")
    args = parser.parse_args()
    cases = []
    with tempfile.TemporaryDirectory() as name:
        given = args.photos or photo_tree(Path(name) / "made", classes=4, per_class=50)
        photos = _repeated(given, Path(name) / "photos")
        for label, make in loaders(photos, Path(name)):
            cases.append(case := _case(label, make, args.rounds, args.seconds))
            print(_row(case), flush=True)
    save_facts(args.json, None, {"rounds": args.rounds, "cases": cases})


def _repeated(photos: Path, folder: Path) -> Path:
    """As many as an epoch needs that is longer than a measurement."""
    files = [file for file in sorted(photos.glob("*/*")) if file.is_file()]
    for number in range(max(1, _IMAGES // len(files))):
        for file in files:
            link = folder / file.parent.name / f"{number}-{file.name}"
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(file.resolve())
    return folder


def _case(label: str, make: Callable[[], Any], rounds: int, seconds: float) -> dict[str, Any]:
    chosen = []
    for _ in range(_RUNS):
        tuning = fastpipe.autotune(make(), seconds=seconds)
        chosen.append((tuning.best.settings, tuning.seconds, len(tuning.trials)))
    base = Base(make())
    times: dict[Settings, list[float]] = {one: [] for one in every(base.settings)}
    times |= {settings: [] for settings, _, _ in chosen}
    times.setdefault(base.settings, [])
    count = len(times)
    for number in range(rounds):
        least = min((statistics.median(found) for found in times.values() if found), default=0.0)
        for settings, found in times.items():
            # Settings that are hopeless after the first round are not measured again.
            if not number or statistics.median(found) < 1.3 * least or settings in (one[0] for one in chosen):
                found.append(timed(base, settings))
    best = min(times, key=lambda one: statistics.median(times[one]) if len(times[one]) == rounds else 1e9)
    finals = dict.fromkeys([best, base.settings, *(settings for settings, _, _ in chosen)])
    times = {settings: [] for settings in finals}
    for _ in range(max(5, rounds)):
        for settings, found in times.items():
            found.append(timed(base, settings))
    return {
        "label": label, "settings": count, "before_s": statistics.median(times[base.settings]),
        "best": best.as_text(base.settings), "best_s": statistics.median(times[best]),
        "best_spread": _spread(times[best]),
        "runs": [
            {"chosen": settings.as_text(base.settings), "s": statistics.median(times[settings]),
             "spread": _spread(times[settings]), "seconds": took, "trials": trials}
            for settings, took, trials in chosen
        ],
    }  # fmt: skip


def _spread(times: list[float]) -> float:
    middle = statistics.median(times)
    return statistics.median(abs(one - middle) for one in times) / middle


def _row(case: dict[str, Any]) -> str:
    lines = [f"{case['label']}: {case['settings']} settings, the best {case['best']}"]
    for run in case["runs"]:
        more = run["s"] / case["best_s"] - 1
        allowed = max(0.05, 2 * run["spread"], 2 * case["best_spread"])
        gain = case["before_s"] / run["s"]
        verdict = "near enough" if more <= allowed else "MISSED"
        lines.append(
            f"    {run['chosen']}: {more:+.1%} of its time (allowed {allowed:.1%}), {verdict}; "
            f"{gain:.2f}× as it was; {run['trials']} trials in {run['seconds']:.0f} s"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
