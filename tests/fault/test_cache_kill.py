"""A cache that processes are killed over: what it says is right, and what was whole is used again.

Children are forked, as importing torch takes seconds.  They are killed by progress, never by
time: by themselves, right before or after one of the writes that an entry is made of, or by
the test, when they have told of a batch.
"""

from __future__ import annotations

import gc
import hashlib
import multiprocessing
import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torchvision import transforms as v1

from fastpipe import Cache, FastImageFolder, FastLoader
from fastpipe.bench.synthetic import photo_tree
from fastpipe.core import cache_store as store_module
from fastpipe.core import locks
from fastpipe.core.caches import open_cache_store
from fastpipe.images.batch import MADE, ImageBatch
from fastpipe.images.reader import ImageReader

pytestmark = pytest.mark.skipif(
    not hasattr(os, "pidfd_open"), reason="run it on Linux, which has SIGKILL and fork"
)

FORK = multiprocessing.get_context("fork") if hasattr(os, "fork") else multiprocessing.get_context()
CROP = v1.Compose([v1.RandomResizedCrop(16), v1.RandomHorizontalFlip(), v1.ToTensor()])
_KEPT = 11  # of fastpipe/native/status.h: made from a kept image
COUNT, MIB = 24, 1 << 20


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory, settled: Callable[[Path], Path]) -> Path:
    root = tmp_path_factory.mktemp("tree")
    return settled(photo_tree(root, classes=2, per_class=COUNT // 2, sizes=(20, 40)))


@pytest.fixture(autouse=True)
def _own_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def _stream(tree: Path, cache: Any, epochs: int = 2, told: Any = None) -> str:
    """A hash of all batches of some epochs."""
    loader = FastLoader(FastImageFolder(tree, CROP, cache=cache, threads=3), 4, shuffle=True, seed=7)
    digest = hashlib.sha256()
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        for images, targets in loader:
            digest.update(images.numpy().tobytes() + targets.numpy().tobytes())
            if told is not None:
                told.send("batch")
    return digest.hexdigest()


@pytest.fixture(scope="module")
def expected(tree: Path) -> str:
    return _stream(tree, "off")


def _train(tree: Path, cache: Cache, told: Any, die_at: int, epochs: int) -> None:
    """A training, which may kill itself at one of the writes to the cache's files."""
    writes, real, opened, open_image = 0, os.pwritev, set[str](), ImageReader.open

    def pwritev(descriptor: int, parts: Any, offset: int) -> int:
        nonlocal writes
        writes += 1
        if writes == die_at:
            data = b"".join(parts)
            real(descriptor, [data[: len(data) // 2]], offset)  # cut off in the middle
            os.kill(os.getpid(), signal.SIGKILL)
        return real(descriptor, parts, offset)

    def pwrite(descriptor: int, data: Any, offset: int) -> int:
        return pwritev(descriptor, [data], offset)

    def noted(self: ImageReader, blob: bytes, path: str, *more: Any) -> Any:
        opened.add(path)
        return open_image(self, blob, path, *more)

    def look(self: ImageBatch) -> None:
        for item, (outcome, reason) in zip(self.items, self._statuses[:, :2].tolist(), strict=True):
            if outcome == MADE and reason != _KEPT:
                opened.add(item.path)
        real_look(self)

    real_look, ImageBatch._look = ImageBatch._look, look  # type: ignore[method-assign]
    store_module.os.pwrite, store_module.os.pwritev = pwrite, pwritev
    locks._TRIES = 60_000  # whoever has the lock may be kept waiting for a core
    ImageReader.open = noted  # type: ignore[method-assign]
    torch.set_num_threads(1)
    digest = _stream(tree, cache, epochs, told if not die_at and epochs > 2 else None)
    told.send((digest, len(opened)))


class Training:
    """A training in another process."""

    def __init__(self, tree: Path, cache: Cache, die_at: int = 0, epochs: int = 2) -> None:
        self.told, other = FORK.Pipe(duplex=False)
        self.process = FORK.Process(target=_train, args=(tree, cache, other, die_at, epochs))
        self.process.start()
        other.close()

    def next(self) -> Any:
        return self.told.recv()

    def result(self) -> tuple[str, int]:
        """The hash of its batches, and how many files it decoded."""
        while (found := self.next()) == "batch":
            pass
        self.end(0)
        return found  # type: ignore[no-any-return]

    def end(self, code: int) -> None:
        self.process.join(60)
        assert self.process.exitcode == code
        self.process.close()
        self.told.close()


@pytest.fixture
def trainings() -> Iterator[list[Training]]:
    """Those of a test: none of them outlives it."""
    started: list[Training] = []
    yield started
    for one in started:
        try:
            one.process.kill()
            one.process.join()
        except ValueError:  # it is closed: it has ended
            pass


def _entries(folder: Path) -> int:
    """Whole entries, as another process sees them."""

    def look() -> None:
        option = Cache("disk", 15 * MIB, dir=folder)
        opened = open_cache_store(option)
        assert opened is not None
        sender.send(sum(opened._verified(entry) for entry in opened.entries()))

    receiver, sender = FORK.Pipe(duplex=False)
    child = FORK.Process(target=look)
    child.start()
    sender.close()
    count = receiver.recv()
    child.join()
    child.close()
    receiver.close()
    return int(count)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_killed_again_and_again_while_it_fills_a_cache(
    tree: Path, tmp_path: Path, expected: str, seed: int
) -> None:
    """An entry takes two writes (pixels with their note, and its record), and a third where there is no room
    for it yet; one of them is cut off."""
    draw = random.Random(seed)
    option = Cache("disk", 16 * MIB, dir=tmp_path)
    kept = 0
    for _ in range(10):
        training = Training(tree, option, die_at=draw.randrange(1, 10))
        training.end(-signal.SIGKILL)
        now = _entries(tmp_path)
        assert kept <= now <= COUNT, "what was whole stays"
        kept = now
        assert sorted(os.listdir(tmp_path / "fastpipe-decoded")) == ["000000.data", "000000.log", "lock"]
    assert kept > 5
    digest, opened = Training(tree, option).result()
    assert digest == expected
    assert opened == COUNT - kept, "nothing that was whole is decoded again"
    assert Training(tree, option).result() == (expected, 0)


@pytest.mark.parametrize("where", ["disk", "ram"])
def test_two_trainings_at_once(
    tree: Path, tmp_path: Path, expected: str, where: Any, trainings: list[Training]
) -> None:
    option = Cache(where, 16 * MIB, dir=tmp_path if where == "disk" else None)
    trainings += [Training(tree, option), Training(tree, option)]
    results = [one.result() for one in trainings]
    assert [digest for digest, _ in results] == [expected] * 2


@pytest.mark.parametrize("where", ["disk", "ram"])
def test_one_is_killed_and_the_other_goes_on(
    tree: Path, tmp_path: Path, expected: str, where: Any, trainings: list[Training]
) -> None:
    option = Cache(where, 16 * MIB, dir=tmp_path if where == "disk" else None)
    victim = Training(tree, option, epochs=10_000)
    trainings.append(victim)
    assert victim.next() == "batch"
    other = Training(tree, option)
    trainings.append(other)
    for _ in range(3):
        assert victim.next() == "batch"
    assert victim.process.pid is not None
    os.kill(victim.process.pid, signal.SIGKILL)
    assert other.result()[0] == expected
    victim.end(-signal.SIGKILL)
    late = Training(tree, option)
    trainings.append(late)
    digest, opened = late.result()
    assert digest == expected
    assert opened == (0 if where == "disk" else COUNT), "memory is gone with its last user"
