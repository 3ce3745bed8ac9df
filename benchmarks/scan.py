"""How long it takes to find the samples of a folder, beside torchvision.

    python benchmarks/scan.py --files 100000 --classes 100

Makes a tree of empty files, then scans it with torchvision and with fastpipe in turn, and
prints the median of each and their ratio.  Run as root with ``--cold`` it drops the page
cache before every scan (Linux; the whole machine feels it); without, all scans read
directories that are cached.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sized

from torchvision.datasets.folder import make_dataset

from fastpipe.index.folder import IMG_EXTENSIONS, find_classes, scan_folder


def make_tree(root: str, files: int, classes: int) -> None:
    """Empty files, named as ImageNet names its own."""
    for index in range(classes):
        folder = os.path.join(root, f"n{index:08}")
        os.mkdir(folder)
        for number in range(index, files, classes):
            os.close(os.open(os.path.join(folder, f"n{index:08}_{number}.JPEG"), os.O_CREAT | os.O_WRONLY))


def drop_caches() -> None:
    os.sync()
    with open("/proc/sys/vm/drop_caches", "w") as control:
        control.write("3")


def seconds(scan: Callable[[], Sized], *, cold: bool) -> float:
    """How long one scan takes, the throwing away of its result not counted."""
    if cold:
        drop_caches()
    start = time.perf_counter()
    result = scan()
    elapsed = time.perf_counter() - start
    del result
    return elapsed


def compare(root: str, repeats: int, *, cold: bool) -> None:
    """Scan in turn and print medians; say so if the results differ."""
    _, class_to_idx = find_classes(root)

    def reference() -> Sized:
        found: list[tuple[str, int]] = make_dataset(root, class_to_idx, extensions=IMG_EXTENSIONS)
        return found

    def ours() -> Sized:
        return scan_folder(root, class_to_idx, extensions=IMG_EXTENSIONS)

    print("results equal:", reference() == ours())
    times: dict[str, list[float]] = {"torchvision": [], "fastpipe": []}
    for _ in range(repeats):
        times["torchvision"].append(seconds(reference, cold=cold))
        times["fastpipe"].append(seconds(ours, cold=cold))
    medians = {name: statistics.median(values) for name, values in times.items()}
    for name, values in times.items():
        print(f"{name:12} median {medians[name]:.3f} s   min {min(values):.3f} s   max {max(values):.3f} s")
    ratios = [a / b for a, b in zip(times["torchvision"], times["fastpipe"], strict=True)]
    middle = statistics.median(ratios)
    print(f"torchvision / fastpipe: {middle:.2f} (from {min(ratios):.2f} to {max(ratios):.2f})")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--classes", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--dir", help="where to make the tree; the system's temporary folder if left out")
    parser.add_argument(
        "--cold", action="store_true", help="drop the page cache before each scan (root, Linux)"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.dir) as root:
        make_tree(root, options.files, options.classes)
        print(f"{options.files} files in {options.classes} classes, {'cold' if options.cold else 'cached'}")
        compare(root, options.repeats, cold=options.cold)


if __name__ == "__main__":
    main()
