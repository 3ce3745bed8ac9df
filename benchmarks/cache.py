"""Measure each form of the cache of images: bytes, images/s, and the epoch that fills the cache.

::

    python benchmarks/cache.py --data FOLDER --rounds 5 --json FILE --plot FILE --peers FILE

Epochs of all rows take turns; ratios are of epochs of the same round.  An epoch goes through every photograph
a few times, so that a small folder is long enough to measure; when a cache is filled, through copies of the
files.  The batches of all rows are compared with those of a cache that is off.  The picture also has peers of
``run.py images --peers`` that convert the files.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import torch
from rounds import add_photo_options, figures, photos_of, save_facts
from torch.utils.data import DataLoader, Dataset, Subset
from torchvision.datasets import ImageFolder

from fastpipe import Cache, FastImageFolder, FastLoader
from fastpipe.bench.images import check_transform, train_transform
from fastpipe.core.caches import open_cache_store
from fastpipe.core.machine import available_cpus

BATCH = 64
_ROOM = 8 << 30
_TASKS = {
    "crop, uint8": lambda: train_transform("uint8"),
    "crop, float32": lambda: train_transform("float32"),
    "evaluation, uint8": check_transform,
}
_FORMS = ("pixels", "coefficients", "index")
_OFF, _STOCK = "off", "ImageFolder + DataLoader"


def caches(folder: Path) -> dict[str, Cache]:
    """Return the caches to compare, by the row's name."""
    kept = {f"{form}, ram": Cache("ram", _ROOM + n, form=form) for n, form in enumerate(_FORMS)}
    on_disk = {f"{form}, disk": Cache("disk", _ROOM, folder / form, form) for form in _FORMS[1:]}
    return {_OFF: Cache("off"), **kept, **on_disk}


def epoch(loader: Any, step_s: float = 0) -> tuple[float, int]:
    """Return the images/s of an epoch, and a sum over its batches. A step beside it takes no processor."""
    start, images, total = perf_counter(), 0, 0
    for batch, labels in loader:
        images += len(labels)
        sleep(step_s)
        total += int(labels.sum()) + int(batch[:, :, ::97, ::89].to(torch.float64).sum().item() * 1000)
    return images / (perf_counter() - start), total


def loader_of(root: Path, transform: Any, cache: Cache, copies: int) -> tuple[Any, Any]:
    """Return a loader of several copies of a folder's images, and its dataset."""
    dataset = FastImageFolder(str(root), transform, cache=cache)
    order = torch.randperm(copies * len(dataset), generator=torch.Generator().manual_seed(0)) % len(dataset)
    return FastLoader(dataset, BATCH, sampler=order.tolist(), seed=0), dataset


def rates(root: Path, folder: Path, rounds: int, copies: int, workers: int) -> Iterator[dict[str, Any]]:
    """Measure epochs of all rows and tasks, once their caches are filled."""
    files = sum(path.stat().st_size for path in root.rglob("*.*") if path.is_file())
    for task, make in _TASKS.items():
        kept = caches(folder)
        loaders = {name: loader_of(root, make(), cache, copies)[0] for name, cache in kept.items()}
        stock: Dataset[Any] = ImageFolder(str(root), make())
        order = torch.arange(len(stock)).repeat(2).tolist()  # type: ignore[arg-type]
        loaders[_STOCK] = DataLoader(
            Subset(stock, order), BATCH, num_workers=workers, persistent_workers=True
        )
        found: dict[str, list[float]] = {name: [] for name in loaders}
        for number in range(rounds + 2):
            sums = {}
            for name, loader in loaders.items():
                rate, sums[name] = epoch(loader)
                if number >= 2:  # the first epoch fills a cache
                    found[name].append(rate)
            del sums[_STOCK]  # draws other crops
            if len(set(sums.values())) > 1:
                raise SystemExit(f"the batches differ: {sums}")
        for name, values in found.items():
            store = open_cache_store(kept[name]) if name in kept else None
            row = {
                "task": task, "row": name, "images_per_s": figures(values),
                "x_off": figures([one / off for one, off in zip(values, found[_OFF], strict=True)]),
                "x_stock": figures([one / other for one, other in zip(values, found[_STOCK], strict=True)]),
            }  # fmt: skip
            if store is not None:
                row["bytes_of_files"] = round(sum(entry.nbytes for entry in store.entries()) / files, 3)
            yield row
        del loaders, kept


def first_epochs(root: Path, folder: Path, rounds: int) -> Iterator[dict[str, Any]]:
    """Measure the epoch that fills a cache, against epochs without one before and after it: alone, and beside
    steps of a model that takes 40 % of the images/s that are made without a cache."""
    transform = train_transform("uint8")

    def rate(cache: Cache, step_s: float = 0) -> float:
        return epoch(loader_of(root, transform, cache, 1)[0], step_s)[0]

    step_s = BATCH / (0.4 * rate(Cache("off")))
    for name in list(caches(folder))[1:]:
        ratios: dict[float, list[float]] = {0: [], step_s: []}
        for _ in range(rounds):
            for step, found in ratios.items():
                shutil.rmtree(folder, ignore_errors=True)
                before, filling = rate(Cache("off"), step), rate(caches(folder)[name], step)
                found.append(filling / statistics.mean([before, rate(Cache("off"), step)]))
        yield {"row": name, "x_off": figures(ratios[0]), "x_off_beside_steps": figures(ratios[step_s])}


def copied(root: Path, to: Path, copies: int) -> Path:
    """Return a folder with several copies of each file: an epoch of a few batches would measure its start."""
    for path in filter(Path.is_file, root.rglob("*.*")):
        place = to / path.relative_to(root).parent
        place.mkdir(parents=True, exist_ok=True)
        for number in range(copies):
            shutil.copyfile(path, place / f"{number}-{path.name}")
    return to


def third(root: Path, rounds: int, copies: int) -> dict[str, Any]:
    """Measure epochs with room for a third of the decoded images: pixels, and the form that is chosen."""
    transform = train_transform("uint8")
    whole = Cache("ram", _ROOM, form="pixels")
    epoch(loader_of(root, transform, whole, 1)[0])
    store = open_cache_store(whole)
    assert store is not None
    room = store.allocated // 3
    loaders = {
        form: loader_of(root, transform, Cache("ram", room + n, form=form), copies)
        for n, form in enumerate(("pixels", "auto"))
    }
    ratios: list[float] = []
    for number in range(rounds + 1):
        rate = {form: epoch(loader)[0] for form, (loader, _) in loaders.items()}
        if number:
            ratios.append(rate["auto"] / rate["pixels"])
    return {"room": room, "plan": str(loaders["auto"][1].plan), "x_pixels": figures(ratios)}


def draw(rows: list[Mapping[str, Any]], peers: list[Mapping[str, Any]], path: Path) -> None:
    """Draw images/s against bytes for each image.  ``peers`` are rows of ``run.py images``."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.6, 4.6), dpi=160, layout="constrained")
    axes = figure.subplots()
    points = []
    for row in rows:
        if row["task"] != "crop, uint8" or "disk" in row["row"]:
            continue
        name = "no cache" if row["row"] == _OFF else row["row"].partition(",")[0].partition(" + ")[0]
        colour = "#9a9fa6" if row["row"] == _STOCK else "#0b8a6f"
        points.append((row.get("bytes_of_files", 0.0), row["images_per_s"]["median"], name, colour))
    for row in peers:
        if row["output"] == "uint8" and row.get("prepared_size") is not None:
            name = row["label"].removesuffix(", uint8")
            points.append((row["prepared_size"], row["images_per_s"]["median"], name, "#b4632d"))
    for x, y, name, colour in points:
        axes.plot(x, y, "o", color=colour)
        below = name == "no cache"  # whose label would touch that of the index
        axes.annotate(name, (x, y), xytext=(7, -11 if below else 3), textcoords="offset points")
    axes.set_xlabel("bytes that are kept, × those of the files")
    axes.set_ylabel("images/s, random crops, uint8")
    axes.set_ylim(0)
    axes.set_xlim(-0.3, axes.get_xlim()[1] * 1.15)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, facecolor="white")


def main() -> None:
    """Measure and print all parts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_photo_options(parser, 5)
    parser.add_argument("--plot", type=Path, help="file for a picture")
    parser.add_argument("--peers", type=Path, help="JSON of run.py images --peers, for the picture")
    parser.add_argument("--copies", type=int, default=4, help="of each photograph in an epoch (default: 4)")
    args = parser.parse_args()
    photos = photos_of(args)
    with tempfile.TemporaryDirectory() as temporary:
        root, folder = Path(photos.folder), Path(temporary) / "kept"
        rows = []
        for row in rates(root, folder, args.rounds, args.copies, available_cpus()):
            rows.append(row)
            print(
                f"{row['task']:18} {row['row']:26} {row['images_per_s']['median']:7.0f} images/s  "
                f"{row['x_off']['median']:.2f} x off  {row['x_stock']['median']:.2f} x {_STOCK}  "
                f"{row.get('bytes_of_files', 0):.2f} x bytes",
                flush=True,
            )
        shutil.rmtree(folder, ignore_errors=True)
        many = copied(root, Path(temporary) / "many", 2 * args.copies)
        first = list(first_epochs(many, folder, args.rounds))
        for row in first:
            beside = row["x_off_beside_steps"]["median"]
            print(
                f"first epoch, {row['row']:22} {row['x_off']['median']:.2f} x off, {beside:.2f} beside steps",
                flush=True,
            )
        part = third(root, args.rounds, args.copies)
        print(f"room for a third of the pixels: {part['x_pixels']['median']:.2f} x form='pixels'")
    save_facts(args.json, photos, {"rows": rows, "first": first, "third": part})
    if args.plot:
        peers = json.loads(args.peers.read_text(encoding="utf-8"))["rows"] if args.peers else []
        draw(rows, peers, args.plot)


if __name__ == "__main__":
    main()
