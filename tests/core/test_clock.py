"""Times of stages, and NVTX ranges with a module that notes them instead of the real one."""

from __future__ import annotations

import copy
import json
import pickle
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from scripts import ran

from fastpipe.core import clock as module
from fastpipe.core.clock import StageClock
from fastpipe.core.files import read_file


def test_a_clock_adds_up_in_all_threads_until_it_is_reset() -> None:
    clock, start = StageClock(), threading.Barrier(8)

    def work(number: int) -> None:
        start.wait()
        for _ in range(1000):
            clock.add("decode", 1_000)
            clock.add("read", 2_000)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    clock.add("read", 1_000_000_000)
    assert clock.totals() == pytest.approx({"decode": 0.008, "read": 1.016})
    assert StageClock().totals() == {}
    for duplicate in (copy.copy(clock), copy.deepcopy(clock), pickle.loads(pickle.dumps(clock))):
        assert duplicate.totals() == {}
    clock.reset()
    assert clock.totals() == {}
    clock.add("read", 3)
    assert clock.totals() == {"read": 3e-9}


_FAKE = """
import threading
calls = []
def push_range(message=None, color="blue", domain=None):
    calls.append((threading.get_ident(), message))
def pop_range(domain=None):
    calls.append((threading.get_ident(), None))
"""
_SCRIPT = """
import json, os, sys
sys.path.insert(0, sys.argv[2])
os.environ["FASTPIPE_NVTX"] = "1"
import torch
from torchvision import transforms
import fastpipe, nvtx
transform = transforms.Compose([transforms.Resize((8, 8)), transforms.ToTensor()])
for backend in ("auto", "pillow"):
    nvtx.calls.clear()
    dataset = fastpipe.FastImageFolder(sys.argv[1], transform, decode=fastpipe.Decode(backend))
    loader = fastpipe.FastLoader(dataset, batch_size=4, device="cpu", augment=lambda *batch: list(batch))
    for _ in loader:
        pass
    print(json.dumps(nvtx.calls))
"""


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    module._marks.cache_clear()
    yield
    module._marks.cache_clear()


@pytest.mark.slow
def test_every_range_of_a_loader_ends_in_the_thread_that_began_it(photo_tree: Path, tmp_path: Path) -> None:
    (tmp_path / "nvtx.py").write_text(_FAKE)
    done = ran("-c", _SCRIPT, photo_tree, tmp_path)
    assert done.returncode == 0, done.stderr
    for backend, calls in zip(("auto", "pillow"), done.stdout.splitlines(), strict=True):
        stacks: dict[int, list[str]] = {}
        within: dict[str, set[tuple[str, ...]]] = {}
        for thread, message in json.loads(calls):
            stack = stacks.setdefault(thread, [])
            if message is None:
                stack.pop()
            else:
                within.setdefault(message.removeprefix("fastpipe."), set()).add(tuple(stack))
                stack.append(message.removeprefix("fastpipe."))
        assert not any(stacks.values())
        assert within["wait"] == {()}
        if backend == "auto":  # the engine's threads know nothing of Python
            assert within.keys() == {"wait", "collate", "transfer", "augment"}
            continue
        assert len(stacks) >= 2
        stages = {"wait", "collate", "transfer", "augment", "sample", "read", "decode", "transform"}
        assert within.keys() == stages
        assert within["read"] == {("sample",)}
        assert within["decode"] <= {("sample", "transform"), ("sample",)}


class Notes(list[Any]):
    """Remembers the beginnings and ends of ranges."""

    def push(self, name: str) -> None:
        self.append(name)

    def pop(self) -> None:
        self.append(None)


def test_a_range_ends_also_where_the_function_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def function(number: int) -> int:
        """Of the script."""
        return 1 // number

    for value in (None, "", "0"):
        monkeypatch.delenv("FASTPIPE_NVTX", raising=False)
        if value is not None:
            monkeypatch.setenv("FASTPIPE_NVTX", value)
        assert module.ranged("read")(function) is function
    assert not hasattr(read_file, "__wrapped__")  # of this process, which was not asked
    notes = Notes()
    monkeypatch.setenv("FASTPIPE_NVTX", "1")
    monkeypatch.setattr(module, "_marks", lambda: (notes.push, notes.pop))
    outer = module.ranged("outer")(module.ranged("inner")(function))
    assert outer(1) == 1 and outer.__doc__ == "Of the script."
    with pytest.raises(ZeroDivisionError):
        outer(number=0)
    assert notes == ["fastpipe.outer", "fastpipe.inner", None, None] * 2


@pytest.mark.parametrize("has_gpu", [True, False])
def test_torch_makes_ranges_where_it_has_a_gpu_and_the_package_otherwise(
    has_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_torch, of_package = Notes(), Notes()
    nvtx = SimpleNamespace(range_push=of_torch.push, range_pop=of_torch.pop)
    torch = SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: has_gpu, nvtx=nvtx))
    package = SimpleNamespace(push_range=of_package.push, pop_range=of_package.pop)
    for name, fake in (("torch", torch), ("nvtx", package)):
        monkeypatch.setitem(sys.modules, name, fake)
    push, pop = module._marks()
    push("a")
    pop()
    assert (of_torch if has_gpu else of_package) == ["a", None]
    assert not (of_package if has_gpu else of_torch)


def test_no_nvtx_warns_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("FASTPIPE_NVTX", "1")
    for name in ("torch", "nvtx"):
        monkeypatch.setitem(sys.modules, name, None)
    double = module.ranged("double")(lambda number: 2 * number)
    assert [double(1), double(2)] == [2, 4]
    assert len(caplog.messages) == 1 and "pip install nvtx" in caplog.text
