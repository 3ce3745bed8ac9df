"""Measure the time to find the samples of a folder and the memory to keep them, beside torchvision.

    python benchmarks/scan.py --files 1000000 --classes 1000

Makes a tree of empty files, then scans it with torchvision and with fastpipe in turn, and
prints the median of each and their ratio: without the index cache, for the first time with
it, and opened again with it.  Then what a fresh process grows by (PSS) when it opens the
dataset, and what a forked worker copies when it reads every path.  Run as root with
``--cold`` it drops the page cache before every scan (Linux; the whole machine feels it);
without, all scans read directories that are cached.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sized

from torchvision.datasets.folder import make_dataset

from fastpipe.core.class_folders import TORCHVISION_EXTENSIONS, IndexCache, find_classes, scan_folder

_LINKS = 50_000  # of one file; ext4 allows 65,000
_SETTLED_S = 2.5  # folders that were changed later than 2 s before a scan are not trusted

# In a fresh process: the dataset's share of memory, and a forked worker's copies.
_MEMORY = """if True:
    import gc, os, sys, time
    from fastpipe import FastImageFolder
    from fastpipe.core.class_folders import IndexCache

    root, small, cache, how = sys.argv[1:]

    class Dataset(FastImageFolder):
        def _index_cache(self):
            return IndexCache(cache, keep_from_s=0) if how == "opened again" else None

    def kib(field):
        gc.collect()
        with open("/proc/self/smaps_rollup") as file:
            return next(int(line.split()[1]) for line in file if line.startswith(field + ":"))

    Dataset(small)
    before = kib("Pss")
    start = time.perf_counter()
    dataset = Dataset(root)
    seconds = time.perf_counter() - start
    grown = kib("Pss") - before
    print(f"{how}: {seconds:.2f} s for FastImageFolder in a fresh process; {grown / 1024:.1f} MiB of PSS, "
          f"{grown * 1024 / len(dataset):.0f} bytes a sample", flush=True)
    if os.fork() == 0:
        before = kib("Private_Dirty")
        length = sum(len(path) + target for path, target in dataset.samples)
        copied = kib("Private_Dirty") - before
        print(f"{how}: a forked worker that reads every path copies {copied} KiB", flush=True)
        os._exit(0)
    os.wait()
"""


def make_tree(root: str, files: int, classes: int) -> None:
    """Empty files, named as ImageNet names its own.  Links to few, because they are faster to make."""
    for index in range(classes):
        name = f"n{index:08}"
        os.mkdir(os.path.join(root, name))
        folder = os.open(os.path.join(root, name), os.O_RDONLY)
        for count, number in enumerate(range(index, files, classes)):
            path = f"{name}_{number}.JPEG"
            if count % _LINKS == 0:
                first = path
                os.close(os.open(path, os.O_CREAT | os.O_WRONLY, dir_fd=folder))
            else:
                os.link(first, path, src_dir_fd=folder, dst_dir_fd=folder)
        os.close(folder)


def drop_caches() -> None:
    os.sync()
    with open("/proc/sys/vm/drop_caches", "w") as control:
        control.write("3")


def seconds(scan: Callable[[], Sized], *, cold: bool) -> float:
    """Return the time of one scan, without releasing its result."""
    if cold:
        drop_caches()
    start = time.perf_counter()
    result = scan()
    elapsed = time.perf_counter() - start
    del result
    return elapsed


def compare(root: str, cache: IndexCache, repeats: int, *, cold: bool) -> None:
    """Scan in turn and print medians; say so if the results differ."""
    _, class_to_idx = find_classes(root)

    def reference() -> Sized:
        found: list[tuple[str, int]] = make_dataset(root, class_to_idx, extensions=TORCHVISION_EXTENSIONS)
        return found

    def without() -> Sized:
        return scan_folder(root, class_to_idx, extensions=TORCHVISION_EXTENSIONS)

    def again() -> Sized:
        return scan_folder(root, class_to_idx, extensions=TORCHVISION_EXTENSIONS, cache=cache)

    def first() -> Sized:
        shutil.rmtree(cache.path, ignore_errors=True)
        return again()

    expected = reference()
    print("results equal:", all(expected == scan() for scan in (without, first, again)))
    del expected
    scans = {
        "torchvision": reference, "without cache": without, "first with cache": first, "opened again": again
    }  # fmt: skip
    times: dict[str, list[float]] = {name: [] for name in scans}
    for _ in range(repeats):
        for name, scan in scans.items():
            times[name].append(seconds(scan, cold=cold))
    for name, values in times.items():
        ratios = [a / b for a, b in zip(times["torchvision"], values, strict=True)]
        print(
            f"{name:16} median {statistics.median(values):.3f} s   min {min(values):.3f} s   "
            f"max {max(values):.3f} s   torchvision's time / this: {statistics.median(ratios):.2f} "
            f"(from {min(ratios):.2f} to {max(ratios):.2f})"
        )


def memory(root: str, cache: IndexCache, small: str) -> None:
    """Print what fresh processes take, with what ``compare`` has left in the cache and without."""
    make_tree(small, 1, 1)
    for how in ("opened again", "scanned"):
        subprocess.run([sys.executable, "-c", _MEMORY, root, small, str(cache.path), how], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--files", type=int, default=1_000_000)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--dir", help="where to make the tree; the system's temporary folder if left out")
    parser.add_argument(
        "--cold", action="store_true", help="drop the page cache before each scan (root, Linux)"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        root, small = os.path.join(folder, "root"), os.path.join(folder, "small")
        os.mkdir(root)
        os.mkdir(small)
        make_tree(root, options.files, options.classes)
        time.sleep(_SETTLED_S)
        print(f"{options.files} files in {options.classes} classes, {'cold' if options.cold else 'cached'}")
        cache = IndexCache(os.path.join(folder, "cache"), keep_from_s=0)
        compare(root, cache, options.repeats, cold=options.cold)
        memory(root, cache, small)


if __name__ == "__main__":
    main()
