"""The native core in a process: what it exports, its instruction sets, forks, exits, interruptions, memory."""

from __future__ import annotations

import gc
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scripts import ran
from torchvision import transforms as v1
from torchvision.transforms import v2

from fastpipe import Decode, FastImageFolder, FastLoader
from fastpipe.bench.synthetic import photo_tree as make_photo_tree
from fastpipe.core import pool as jobs
from fastpipe.core.native import native
from fastpipe.errors import ClosedError

InChild = Callable[[Callable[[], object]], None]
TRAINING = v1.Compose([v1.RandomResizedCrop(48), v1.RandomHorizontalFlip(), v1.ToTensor(),
                       v1.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])])  # fmt: skip
TRANSFORMS = {
    "training": TRAINING,
    "evaluation": v1.Compose([v1.Resize(40), v1.CenterCrop(32), v1.PILToTensor()]),
    "lanczos": v1.Compose([v1.Resize((33, 47), v1.InterpolationMode.LANCZOS), v1.ToTensor()]),
    "grey": v1.Compose([v1.RandomResizedCrop(31), v1.Grayscale(3), v1.ToTensor()]),
    "padded": v1.Compose([v1.RandomCrop(600, pad_if_needed=True, fill=(9, 8, 7)), v1.PILToTensor()]),
    "tensors": v2.Compose([v2.ToImage(), v2.RandomResizedCrop(32, antialias=True), v2.ToDtype(torch.float16, scale=True)]),
}  # fmt: skip


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_photo_tree(tmp_path_factory.mktemp("tree"), classes=2, per_class=16, sizes=(301, 403))


def folder(tree: Path, transform: Any = TRAINING, **options: Any) -> FastImageFolder:
    return FastImageFolder(tree, transform, **{"cache": "off", "threads": 2, "seed": 3, **options})


def batches_of(loader: Any) -> list[Any]:
    return [images.clone() for images, _ in loader]


def same(one: list[Any], other: list[Any]) -> bool:
    """In a forked child as well: torch compares so few elements without its threads, which a child does not have."""
    return len(one) == len(other) > 0 and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.fixture(scope="module")
def expected(tree: Path) -> list[Any]:
    """An epoch, in order, by Pillow."""
    return batches_of(FastLoader(folder(tree, decode=Decode(backend="pillow")), batch_size=4, shuffle=True))


@pytest.mark.skipif(shutil.which("nm") is None, reason="apt-get install binutils")
def test_the_module_exports_its_init_function_only() -> None:
    """A second libjpeg in the process must never be met."""
    command = ["nm", "-D", "--defined-only", native.__file__]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert [line.split()[-1] for line in done.stdout.splitlines()] == ["PyInit__native"]


@pytest.mark.few(5)
@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["planes", "last"])
def test_every_instruction_set_makes_the_same_batches(tree: Path, name: str, layout: Any) -> None:
    before, found = native.level(), []
    dataset = folder(tree, TRANSFORMS[name], memory_format=layout)
    try:
        for level in range(3):
            if native.force_level(level):
                found.append(batches_of(FastLoader(dataset, batch_size=8, shuffle=True)))
    finally:
        assert native.force_level(before)
    assert all(same(one, found[0]) for one in found)
    with_pillow = folder(tree, TRANSFORMS[name], memory_format=layout, decode=Decode(backend="pillow"))
    assert same(found[0], batches_of(FastLoader(with_pillow, batch_size=8, shuffle=True)))


BAD_BATCHES: dict[str, Callable[[dict[str, Any]], None]] = {
    "paths": lambda batch: batch.update(ends=batch["ends"] + 1),
    "a path that begins after its end": lambda batch: batch.update(starts=batch["ends"] + 1),
    "a path before its memory": lambda batch: batch.update(starts=batch["starts"] - 1),
    "fewer places": lambda batch: batch.update(places=batch["places"][1:]),
    "a place behind the memory": lambda batch: batch.update(places=batch["places"] + 1),
    "a place before the memory": lambda batch: batch.update(places=batch["places"] - 1),
    "too little memory": lambda batch: batch.update(memory=batch["memory"][:-1]),
    "fewer parameters": lambda batch: batch.update(parameters=batch["parameters"][:, 1:]),
    "parameters of fewer samples": lambda batch: batch.update(parameters=batch["parameters"][1:]),
    "parameters of another type": lambda batch: batch.update(parameters=batch["parameters"].astype(np.float32)),
    "statuses of fewer samples": lambda batch: batch.update(statuses=batch["statuses"][1:]),
    "small statuses": lambda batch: batch.update(statuses=batch["statuses"][:, :7].copy()),
    "statuses that cannot be written": lambda batch: batch["statuses"].setflags(write=False),
    "memory that cannot be written": lambda batch: batch["memory"].setflags(write=False),
    "a larger sample": lambda batch: batch.update(size=(49, 48)),
    "no sample": lambda batch: batch.update(size=(0, 48)),
    "inputs of fewer samples": lambda batch: batch.update(inputs=[None]),
    "inputs that are none": lambda batch: batch.update(inputs=["text", 7]),
    "inputs that are decoded": lambda batch: batch.update(inputs=[np.zeros((9, 9, 3), np.uint8)] * 2),
}  # fmt: skip


def arguments(tree: Path, count: int) -> dict[str, Any]:
    """Those of a native batch of the first images."""
    dataset, each = folder(tree), 3 * 48 * 48 * 4
    paths = [os.fsencode(path) for path, _ in dataset.samples[:count]]
    ends = np.cumsum([len(path) for path in paths])
    return {
        "plan": dataset.plan.native(None, False, False), "prefix": b"", "arena": b"".join(paths),
        "starts": ends - [len(path) for path in paths], "ends": ends,
        "parameters": np.full((count, dataset.plan.draws), 0.5), "memory": np.zeros(count * each, np.uint8),
        "places": np.arange(count) * each, "size": (48, 48), "keeps_files": False,
        "statuses": np.zeros((count, 8), np.uint8), "inputs": None,
    }  # fmt: skip


@pytest.mark.parametrize("fault", BAD_BATCHES)
def test_arrays_that_do_not_fit_together_are_refused(tree: Path, fault: str) -> None:
    """The binding is the last that looks: behind it are pointers."""
    batch = arguments(tree, 2)
    BAD_BATCHES[fault](batch)
    with pytest.raises((ValueError, TypeError, BufferError, RuntimeError)):
        native.image_batch(**batch)


def test_a_batch_keeps_what_it_refers_to(tree: Path) -> None:
    given = arguments(tree, 32)
    statuses, made = given["statuses"], native.image_batch(**given)
    del given
    filled = [np.full(5000, 255, np.uint8) for _ in range(100)]  # where what was dropped may have been
    gc.collect()
    native.run_here(made)
    assert (statuses[:, 0] == 1).all() and len(filled) == 100


def test_a_forked_process_makes_batches_while_the_parent_does(
    tree: Path, expected: list[Any], in_child: InChild
) -> None:
    dataset = folder(tree)
    loader = FastLoader(dataset, batch_size=4, shuffle=True, prefetch_batches=8)
    found = []
    for number, (images, _) in enumerate(loader):
        found.append(images)
        if number < 4:

            def work() -> None:
                assert not jobs._jobs
                assert same(batches_of(FastLoader(folder(tree), batch_size=4, shuffle=True)), expected)
                assert same(batches_of(FastLoader(dataset, batch_size=4, shuffle=True)), batches_of(
                    FastLoader(folder(tree), batch_size=4, shuffle=True)))  # fmt: skip

            in_child(work)
    assert same(found, expected)


def test_a_forked_process_does_not_wait_for_a_batch_of_its_parent(tree: Path, in_child: InChild) -> None:
    dataset = folder(tree)
    batch = dataset._start_batch(range(32))

    def work() -> None:
        with pytest.raises(ClosedError, match="parent process"):
            batch.finish()

    in_child(work)
    assert len(batch.finish()) == 32


SCRIPT = """
import os, sys, threading
import torch
from torch.utils.data import DataLoader
from torchvision import transforms as v1
from fastpipe import FastImageFolder, FastLoader

def main():
    transform = v1.Compose([v1.RandomResizedCrop(48), v1.ToTensor()])
    dataset = FastImageFolder(sys.argv[1], transform, cache="off", threads=2)
    numbers = list(range(len(dataset))) * 100
    {}

if __name__ == "__main__":
    main()
"""
ENDINGS = {
    "one batch": "batch = dataset._start_batch(numbers)",
    "dropped": "dataset._start_batch(numbers)",
    "many": "batches = [dataset._start_batch(numbers) for _ in range(20)]",
    "kept for ever": "sys.kept = [dataset._start_batch(numbers) for _ in range(5)]",
    "a loader": "batches = iter(FastLoader(dataset, 4, sampler=numbers, prefetch_batches=50)); next(batches); sys.b = batches",
    "exit": "dataset._start_batch(numbers); sys.exit(0)",
    "in a thread": "t = threading.Thread(target=lambda: sys.__setattr__('b', dataset._start_batch(numbers))); t.start(); t.join()",
    "closed": "batch = dataset._start_batch(numbers); dataset.close()",
    "of pictures": "dataset.transform = v1.Resize(40); sys.b = dataset._start_batch(numbers)",
    "never used": "pass",
    "a fork": "import warnings; warnings.simplefilter('ignore', DeprecationWarning);"  # of Python 3.12 and later
    " dataset._start_batch(numbers); pid = os.fork() or sys.exit(0); assert not os.waitpid(pid, 0)[1]",
    "a daemon that waits": (
        "b = dataset._start_batch(numbers);"
        " threading.Thread(target=lambda: b.finish(), daemon=True).start()"
    ),
}  # fmt: skip


@pytest.mark.few(1)
@pytest.mark.parametrize("ending", ENDINGS)
def test_a_script_ends_cleanly_while_batches_are_made(tree: Path, ending: str) -> None:
    done = ran("-c", SCRIPT.format(ENDINGS[ending]), tree)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # one within a finalizer
def test_an_interrupted_loop_ends_and_the_next_is_right(
    tree: Path, expected: list[Any], request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(lambda: signal.signal(signal.SIGALRM, signal.SIG_DFL))
    request.addfinalizer(lambda: signal.setitimer(signal.ITIMER_REAL, 0))
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    dataset, rng, interrupted = folder(tree), random.Random(1), 0
    for _ in range(15):
        loader = FastLoader(dataset, batch_size=4, sampler=list(range(32)) * 50, prefetch_batches=4)
        batches = iter(loader)
        next(batches)
        try:
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.001, 0.06))
            for _batch in batches:
                pass
        except KeyboardInterrupt:
            interrupted += 1
        signal.setitimer(signal.ITIMER_REAL, 0)  # one that came within a finalizer is lost, as Python has it
        del batches, loader
    assert interrupted > 0
    assert same(batches_of(FastLoader(folder(tree), batch_size=4, shuffle=True)), expected)


def test_a_dropped_batch_writes_to_no_other_memory(tree: Path, expected: list[Any]) -> None:
    dataset = folder(tree)
    for number in range(60):
        batch = dataset._start_batch(range(32))
        if number % 3 == 0:
            batch.finish()
        del batch
        other = np.zeros((32, 3, 48, 48), np.float32)  # perhaps where the batch was
        deadline = time.monotonic() + 60
        while jobs._jobs and time.monotonic() < deadline:  # until the engine has no batch
            threading.Event().wait(0.001)
        assert not jobs._jobs and not other.any()
    assert same(batches_of(FastLoader(folder(tree), batch_size=4, shuffle=True)), expected)


@pytest.mark.slow
def test_threads_go_from_batch_to_batch_while_python_is_busy() -> None:
    """They never take Python's lock: not even when a batch is done."""
    array, count, batches = np.random.default_rng(0).random((1024, 1024), np.float32), 4, 40
    kind = native.PatchKind((1024, 1024), 2, 4, 0, bytes(4), 0, 4, bytes(4))
    volume = native.Volume((1024, 1024), (1024, 1024), 4, native.volume_in_memory(array), None, 0)
    made = np.zeros((batches, count, array.nbytes), np.uint8)
    statuses = np.zeros((batches, count, 8), np.uint8)
    starts, rows = np.zeros((count, 2), np.int64), np.arange(count)
    channel, before = native.Channel(1), sys.getswitchinterval()
    sys.setswitchinterval(60)
    try:
        begun = [
            jobs.NativeJob(
                native.patch_batch([kind], [made[number]], [volume] * count, starts, rows, statuses[number]),
                channel, 1, lambda: None,
            )
            for number in range(batches)
        ]  # fmt: skip
        until = time.monotonic() + 120
        while not statuses[:, :, 0].all() and time.monotonic() < until:
            pass
        assert statuses[:, :, 0].all()
    finally:
        sys.setswitchinterval(before)
    for job in begun:
        job.wait()
    assert (made.view(np.float32).reshape(batches, count, 1024, 1024) == array).all()


@pytest.mark.skipif(
    not os.path.exists("/proc/self/statm"), reason="run it on Linux, which says what is resident"
)
@pytest.mark.parametrize("name", ["training", "pictures", "bad files"])
def test_memory_does_not_grow_with_epochs(tree: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(tree, tmp_path / "tree")
    if name == "bad files":
        for path in sorted((tmp_path / "tree").rglob("*.jpg"))[::3]:
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    transform = v1.Resize(60) if name == "pictures" else TRAINING
    loader = FastLoader(
        folder(tmp_path / "tree", transform, bad_samples="skip"), batch_size=8, shuffle=True,
        collate_fn=list if name == "pictures" else None,
    )  # fmt: skip

    def after(epochs: int) -> int:
        for _ in range(epochs):
            for _batch in loader:
                pass
        del _batch
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = after(5)
    assert after(10) - before < 16 << 20
    loader.dataset.close()
