"""Measure how long the GIL is held for an image, and estimate the rate on many cores.

::

    python benchmarks/gil.py --data FOLDER --rounds 3 --json gil.json

*CPU time of Python's threads.*  Native threads never take the lock.  Only Python's threads hold it: the
script's, which asks for batches, and ``fastpipe-watcher``.  The CPU time of all of them, by the clock of each
thread, divided by the images, is an upper bound of the time with the lock, as it includes what they do
without it (system calls, ``submit``).  A sampling profiler is not more exact, and slows what
it samples.  Of stock loaders with worker processes only the script's process is measured: each worker has a
lock of its own.

Threads of TensorFlow's that have called Python count as well, with all else that they do: of those the
probe tells more.

*The probe.*  A thread that counts in a tight loop wants the lock all the time, and gives it up when another
thread has asked for it for 0.1 ms.  While it neither runs nor waits for a core, another thread has the lock.
So wall time less CPU time less time in the run queue (``/proc/self/task/*/schedstat``) is the time that
others have it; the same of an idle process is deducted.  This includes each hand-over, and the time for
which a thread that has the lock waits for a core, which CPU time does not include.  The loader has one thread
less than there are cores then, so that the probe has a core.

*Simulated cores.*  Decoding is replaced by 0.85 ms of waiting in native code, which needs no core: n threads
then act like n cores that decode.  The limit should be the cores that read, resample and convert:
``cores / CPU seconds an image of native threads``, measured with no waiting and as many threads as cores.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

from rounds import add_photo_options, figures, photos_of, save_facts
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder

from fastpipe import Cache, Decode, FastImageFolder, FastLoader
from fastpipe.bench.data import Photos
from fastpipe.bench.images import train_transform
from fastpipe.bench.runner import Draws, touch
from fastpipe.core.machine import available_cpus
from fastpipe.core.native import native

_WAIT_NS = 850_000
_ASKED_US, _ASKED_SHARE = 20.0, 0.85
_SWITCH_S = 1e-4
_TF_IMAGES = 65_536  # of an epoch, at most
_LABELS = {"fastpipe": "FastLoader", "kept": "FastLoader, kept in memory", "tf": "fastpipe.tf.image_dataset"}


def python_seconds() -> float:
    """Return the CPU seconds of all threads that may hold Python's lock."""
    threads = [thread for thread in threading.enumerate() if thread.ident is not None]
    return sum(time.clock_gettime(time.pthread_getcpuclockid(int(thread.ident or 0))) for thread in threads)


class Loader:
    """A loader, and epochs of any length of it.

    Args:
        photos: that are read.
        kind: ``"fastpipe"`` or ``"stock"``; ``"kept"``: images that are kept in memory, at 256
            pixels on the short side; ``"tf"``: of ``fastpipe.tf.image_dataset``.
        batch: images in a batch.
        threads: of fastpipe's, or worker processes of the stock loader.
    """

    def __init__(self, photos: Photos, kind: str, batch: int, threads: int) -> None:
        self.batch, self._draws = batch, Draws(photos.indices, batch)
        transform, root = train_transform("float32"), str(photos.folder)
        if kind in ("fastpipe", "kept"):
            kept = {"cache": Cache("ram"), "decode": Decode(short_side=256)}
            options: Any = kept if kind == "kept" else {"cache": "off"}
            dataset: Any = FastImageFolder(root, transform, threads=threads, **options)
            self.loader: Any = FastLoader(dataset, batch, sampler=self._draws)
        elif kind == "tf":
            from fastpipe.tf import image_dataset  # TensorFlow is there only where it is asked for

            files = sorted(str(path) for path in photos.folder.rglob("*.jp*g"))
            self.loader = image_dataset(
                files * (1 + _TF_IMAGES // len(files)), labels=None, image_size=224, parity="pil",
                rescale=1 / 255, batch_size=batch, cache="off", threads=threads, verbose=False,
            )  # fmt: skip
        else:
            self.loader = DataLoader(
                ImageFolder(root, transform), batch, sampler=self._draws,
                num_workers=threads, persistent_workers=threads > 0,
            )  # fmt: skip

    def epoch(self, images: int) -> float:
        """Read so many images, in whole batches; return the seconds it took."""
        self._draws.length = images
        start = time.perf_counter()
        for _, batch in zip(range(images // self.batch), self.loader, strict=False):
            if isinstance(batch, (list, tuple)):
                touch(batch)
        return time.perf_counter() - start

    def images_for(self, seconds: float) -> int:
        """Warm up; return how many images, in whole batches, take about so long."""
        self.epoch(4 * self.batch)
        images = 4 * self.batch
        while (took := self.epoch(images)) < seconds / 4:
            images *= 2
        return min(max(4, round(images * seconds / took / self.batch)) * self.batch, _TF_IMAGES)


class Probe(threading.Thread):
    """A thread that always wants the lock.

    Attributes:
        lost: seconds in which another thread had the lock; None where the system does not tell.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.lost: float | None = None
        self._is_over = threading.Event()

    def run(self) -> None:
        """Count until it is over."""
        start, before = time.perf_counter(), _on_core_or_queued()
        count, is_over = 0, self._is_over.is_set
        while not is_over():
            count += 1
        after, seconds = _on_core_or_queued(), time.perf_counter() - start
        self.lost = None if before is None or after is None else seconds - (after - before)

    def end(self) -> float | None:
        """Stop it; return ``lost``."""
        self._is_over.set()
        self.join()
        return self.lost


def _on_core_or_queued() -> float | None:
    """Seconds that the calling thread ran, or waited for a core."""
    try:
        words = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").read_text().split()
    except OSError:
        return None
    return (int(words[0]) + int(words[1])) / 1e9


def probed(loader: Loader, images: int) -> tuple[float | None, float]:
    """Return microseconds an image that a probe loses beside a loader, and the images per second then."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    try:
        idle = Probe()
        start = time.perf_counter()
        idle.start()
        time.sleep(0.5)
        lost_idle = idle.end()
        share = None if lost_idle is None else lost_idle / (time.perf_counter() - start)
        probe = Probe()
        probe.start()
        seconds = loader.epoch(images)
        lost = probe.end()
    finally:
        sys.setswitchinterval(interval)
    if lost is None or share is None:
        return None, images / seconds
    return max(0.0, lost - share * seconds) / images * 1e6, images / seconds


def held(photos: Photos, batch: int, rounds: int, seconds: float, cores: int) -> list[dict[str, Any]]:
    """Measure the lock for batches of a size; return a row for each loader."""
    # Processes are forked before threads start; TensorFlow comes last.
    kinds = [("stock", cores), ("stock", 0), ("fastpipe", cores), ("kept", cores)]
    kinds += [("tf", cores)] if importlib.util.find_spec("tensorflow") else []
    loaders = [(kind, threads, Loader(photos, kind, batch, threads)) for kind, threads in kinds]
    counts = [loader.images_for(seconds) for _, _, loader in loaders]
    found: list[dict[str, list[float]]] = [{"us": [], "rate": [], "main": []} for _ in loaders]
    for _ in range(rounds):
        for row, images, (_, _, loader) in zip(found, counts, loaders, strict=True):
            gc.collect()
            before, main = python_seconds(), time.thread_time()
            took = loader.epoch(images)
            row["us"].append((python_seconds() - before) / images * 1e6)
            row["main"].append((time.thread_time() - main) / images * 1e6)
            row["rate"].append(images / took)
    del loaders
    gc.collect()
    rows = []
    for row, (kind, threads) in zip(found, kinds, strict=True):
        label = _LABELS.get(kind, f"DataLoader(num_workers={threads})")
        told: dict[str, Any] = {"label": label, "batch": batch, "images_per_s": figures(row["rate"], 1)}
        told["us_an_image"], told["us_main_thread"] = figures(row["us"]), figures(row["main"])
        if kind in _LABELS:
            few = Loader(photos, kind, batch, max(1, cores - 1))
            images = few.images_for(seconds)
            pairs = [probed(few, images) for _ in range(rounds)]
            lost = [value for value, _ in pairs if value is not None]
            told["us_by_probe"] = figures(lost) if lost else None
            told["images_per_s_beside_probe"] = figures([rate for _, rate in pairs], 1)
        rows.append(told)
    return rows


def simulated(
    photos: Photos, batch: int, rounds: int, seconds: float, cores: int, threads: list[int]
) -> dict[str, Any]:
    """Measure with decoding replaced by waiting; return the ceiling and a row for each number of threads."""
    native.simulate_decoding(1)
    try:
        loader = Loader(photos, "fastpipe", batch, cores)
        images = loader.images_for(seconds)
        ceilings, rates = [], []
        for _ in range(rounds):
            before = time.process_time() - python_seconds()
            took = loader.epoch(images)
            each = (time.process_time() - python_seconds() - before) / images
            ceilings.append(cores / each)
            rates.append(images / took)
        ceiling = statistics.median(ceilings)
        native.simulate_decoding(_WAIT_NS)
        loaders = [Loader(photos, "fastpipe", batch, count) for count in threads]
        counts = [loader.images_for(seconds) for loader in loaders]
        found: list[list[float]] = [[] for _ in loaders]
        for _ in range(rounds):
            for row, images, loader in zip(found, counts, loaders, strict=True):
                row.append(images / loader.epoch(images))
    finally:
        native.simulate_decoding(0)
    rows = [
        {"threads": count, "images_per_s": figures(row, 1), "share": figures([r / ceiling for r in row], 4)}
        for count, row in zip(threads, found, strict=True)
    ]
    about = {"waiting_ns": _WAIT_NS, "ceiling": figures(ceilings, 1), "without_waiting": figures(rates, 1)}
    return {**about, "batch": batch, "cores": cores, "rows": rows}


def print_simulated(waited: dict[str, Any], what: str, at_once: int) -> None:
    """Print a line for each number of simulated cores.

    Args:
        waited: as of ``simulated``.
        what: is read.
        at_once: of these that one wait stands for.
    """
    for row in waited["rows"]:
        rate, share = row[f"{what}_per_s"], row["share"]["median"]
        most = row["threads"] * at_once / (waited["waiting_ns"] / 1e9)
        print(
            f"{row['threads']:3} threads  {rate['median']:9,.0f} {what}/s ({rate['low']:,.0f} to "
            f"{rate['high']:,.0f})  {share:5.0%} of that; waiting alone allows {most:,.0f}"
        )
    print(f"asked of 16 threads and more: {_ASKED_SHARE:.0%}")


def main() -> None:
    """Measure, print, and write the result file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_photo_options(parser, 3)
    parser.add_argument("--seconds", type=float, default=2.0, help="of a measurement (default: 2)")
    parser.add_argument("--batch", type=int, nargs="+", default=[64, 256], help="(default: 64 256)")
    parser.add_argument(
        "--threads", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64],
        help="of the simulated cores (default: 1 2 4 8 16 32 64)",
    )  # fmt: skip
    args = parser.parse_args()
    photos, cores = photos_of(args), available_cpus()
    rows: list[dict[str, Any]] = []
    for batch in args.batch:
        rows += held(photos, batch, args.rounds, args.seconds, cores)
    print(f"{'':28} {'batch':>5} {'images/s':>9} {'µs an image':>12} {'range':>18} {'main':>12} {'probe':>7}")
    for row in rows:
        us, probe = row["us_an_image"], row.get("us_by_probe")
        told = f"{row['us_main_thread']['median']:12.1f}"
        told += "" if probe is None else f" {probe['median']:7.1f}"
        span = f"{us['low']:.1f} to {us['high']:.1f}"
        rate = row["images_per_s"]["median"]
        print(f"{row['label']:28} {row['batch']:5} {rate:9,.0f} {us['median']:12.1f} {span:>18} {told}")
    print(f"asked of FastLoader: at most {_ASKED_US:.0f} µs an image")
    waited = simulated(photos, args.batch[0], args.rounds, args.seconds, cores, args.threads)
    print(
        f"\ndecoding replaced by {_WAIT_NS / 1e6:.2f} ms of waiting; {cores} cores can read, resample and "
        f"convert {waited['ceiling']['median']:,.0f} images/s"
    )
    print_simulated(waited, "images", 1)
    save_facts(args.json, photos, {"rounds": args.rounds, "held": rows, "simulated": waited})


if __name__ == "__main__":
    main()
