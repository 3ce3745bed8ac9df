"""NVTX ranges, with a module that notes them in place of the real one: none of this has seen a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fastpipe.core import clock as _nvtx
from fastpipe.core.files import read_file

_FAKE = """
import threading
calls = []
def push_range(message=None, color="blue", domain=None):
    calls.append((threading.get_ident(), message))
def pop_range(domain=None):
    calls.append((threading.get_ident(), None))
"""
_SCRIPT = """
import json, sys
import torch
from torchvision import transforms
import fastpipe, nvtx
transform = transforms.Compose([transforms.Resize((8, 8)), transforms.ToTensor()])
dataset = fastpipe.FastImageFolder(sys.argv[1], transform, decode=fastpipe.Decode(sys.argv[2]))
loader = fastpipe.FastLoader(dataset, batch_size=4, device="cpu", augment=lambda images, labels: [images, labels])
for _ in loader:
    pass
print(json.dumps(nvtx.calls))
"""


@pytest.fixture(autouse=True)
def fresh() -> Any:
    _nvtx._marks.cache_clear()
    yield
    _nvtx._marks.cache_clear()


def test_without_the_variable_functions_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def function() -> None:
        pass

    for value in (None, "", "0"):
        monkeypatch.delenv("FASTPIPE_NVTX", raising=False)
        if value is not None:
            monkeypatch.setenv("FASTPIPE_NVTX", value)
        assert _nvtx.ranged("read")(function) is function
    assert not hasattr(read_file, "__wrapped__")  # of this process, which was not asked


@pytest.mark.parametrize("backend", ["auto", "pillow"])
def test_every_range_of_a_loader_ends_in_the_thread_that_began_it(
    photo_tree: Path, tmp_path: Path, backend: str
) -> None:
    (tmp_path / "nvtx.py").write_text(_FAKE)
    environment = {
        **os.environ,
        "FASTPIPE_NVTX": "1",
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]),
    }
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(photo_tree), backend],
        capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    stacks: dict[int, list[str]] = {}
    within: dict[str, set[tuple[str, ...]]] = {}
    for thread, message in json.loads(done.stdout):
        stack = stacks.setdefault(thread, [])
        if message is None:
            stack.pop()
        else:
            within.setdefault(message, set()).add(tuple(stack))
            stack.append(message)
    assert not any(stacks.values())
    assert within["fastpipe.wait"] == {()}
    of_batches = {f"fastpipe.{name}" for name in ("wait", "collate", "transfer", "augment")}
    if backend == "auto":  # the engine's threads know nothing of Python
        assert within.keys() == of_batches
        return
    assert len(stacks) >= 2
    assert within.keys() == of_batches | {
        f"fastpipe.{name}" for name in ("sample", "read", "decode", "transform")
    }
    assert within["fastpipe.read"] == {("fastpipe.sample",)}
    assert within["fastpipe.decode"] <= {("fastpipe.sample", "fastpipe.transform"), ("fastpipe.sample",)}


class Notes(list[Any]):
    """Imitates what begins and ends ranges."""

    def push(self, name: str) -> None:
        self.append(name)

    def pop(self) -> None:
        self.append(None)


def test_a_range_ends_also_where_the_function_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    notes = Notes()
    monkeypatch.setenv("FASTPIPE_NVTX", "1")
    monkeypatch.setattr(_nvtx, "_marks", lambda: (notes.push, notes.pop))

    @_nvtx.ranged("outer")
    def outer(number: int) -> int:
        """Of the script."""
        return inner(number)

    @_nvtx.ranged("inner")
    def inner(number: int) -> int:
        return 1 // number

    assert outer(1) == 1 and outer.__doc__ == "Of the script."
    with pytest.raises(ZeroDivisionError):
        outer(number=0)
    assert notes == ["fastpipe.outer", "fastpipe.inner", None, None] * 2


@pytest.mark.parametrize("has_gpu", [True, False])
def test_torch_makes_ranges_where_it_has_a_gpu_and_the_package_otherwise(
    has_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_torch, of_package = Notes(), Notes()
    cuda = SimpleNamespace(
        is_available=lambda: has_gpu,
        nvtx=SimpleNamespace(range_push=of_torch.push, range_pop=of_torch.pop),
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))  # type: ignore[arg-type]
    package = SimpleNamespace(push_range=of_package.push, pop_range=of_package.pop)
    monkeypatch.setitem(sys.modules, "nvtx", package)  # type: ignore[arg-type]
    push, pop = _nvtx._marks()
    push("a")
    pop()
    assert (of_torch if has_gpu else of_package) == ["a", None]
    assert not (of_package if has_gpu else of_torch)


def test_without_anything_to_make_ranges_with_it_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FASTPIPE_NVTX", "1")
    for name in ("torch", "nvtx"):
        monkeypatch.setitem(sys.modules, name, None)
    double = _nvtx.ranged("double")(lambda number: 2 * number)
    assert [double(1), double(2)] == [2, 4]
    assert len(caplog.messages) == 1 and "pip install nvtx" in caplog.text
