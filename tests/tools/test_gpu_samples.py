"""Sampling of the GPU, with a module that imitates nvidia-ml-py's: none of this has seen a GPU."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import fastpipe
from fastpipe.tools.recorder import GPUSampler, GPUUse


class Nvml:
    """The functions of nvidia-ml-py that are used, as its documentation has them."""

    NVML_PCIE_UTIL_RX_BYTES = 1

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        self.opened = self.closed = 0
        self.handles: list[Any] = []
        self.rates = [(80, 40), (60, 20)]
        self.has_driver = self.has_device = self.tells_rates = self.tells_throughput = True

    def nvmlInit(self) -> None:
        if not self.has_driver:
            raise self.NVMLError("Driver Not Loaded")
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self.closed += 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> object:
        return self._handle(index)

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> object:
        return self._handle(uuid)

    def _handle(self, of: Any) -> object:
        if not self.has_device:
            raise self.NVMLError("Not Found")
        self.handles.append(of)
        return ("handle", of)

    def nvmlDeviceGetUtilizationRates(self, handle: Any) -> Any:
        assert handle[0] == "handle" and self.opened > self.closed
        if not self.tells_rates:
            raise self.NVMLError("Not Supported")
        gpu, memory = self.rates.pop(0) if len(self.rates) > 1 else self.rates[0]
        return SimpleNamespace(gpu=gpu, memory=memory)

    def nvmlDeviceGetPcieThroughput(self, handle: Any, counter: int) -> int:
        assert handle[0] == "handle" and counter == self.NVML_PCIE_UTIL_RX_BYTES
        if not self.tells_throughput:
            raise self.NVMLError("Not Supported")
        return 2000


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    fake = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)  # type: ignore[arg-type]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return fake


def test_an_epoch_has_the_means_of_what_was_sampled(nvml: Nvml) -> None:
    nvml.rates = [(80, 40)]
    loader = fastpipe.watch(range(3))
    list(loader)
    [times] = loader.epochs
    # An epoch that is over at once has the look at its end.
    assert (times.gpu_utilisation, times.gpu_memory_utilisation) == (0.8, 0.4)
    assert times.pcie_bytes_per_second == 2000 * 1024
    assert "GPU 80% busy" in str(times) and times.scalars()["fastpipe/gpu_utilisation"] == 0.8
    assert (nvml.opened, nvml.closed, nvml.handles) == (1, 1, [0])


def test_means_are_of_all_looks(nvml: Nvml) -> None:
    sampler = GPUSampler(nvml, ("handle", 0))
    nvml.nvmlInit()
    sampler._sample(is_last=False)
    sampler._sample(is_last=False)
    nvml.nvmlInit()
    sampler._thread.start()
    assert sampler.stop() == GPUUse(pytest.approx((0.8 + 0.6 + 0.6) / 3), pytest.approx(0.8 / 3), 2000 * 1024)
    assert sampler.stop() == sampler.stop()


def test_it_is_closed_on_every_way_out(nvml: Nvml, no_gc: None) -> None:
    class Broken:
        def __iter__(self) -> Iterator[int]:
            raise OSError("no workers")

    with pytest.raises(OSError, match="no workers"):
        iter(fastpipe.watch(Broken()))
    assert (nvml.opened, nvml.closed) == (0, 0)  # workers come first
    for _ in fastpipe.watch(range(9)):  # left early
        break
    assert (nvml.opened, nvml.closed) == (1, 1)
    list(fastpipe.watch(range(9)))
    assert (nvml.opened, nvml.closed) == (2, 2)

    def failing() -> None:
        for _ in fastpipe.watch(range(9)):
            raise ValueError("the step")

    with pytest.raises(ValueError, match="the step"):
        failing()
    assert (nvml.opened, nvml.closed) == (3, 3)
    kept = [iter(fastpipe.watch(range(9))) for _ in range(2)]
    kept.append(kept)  # type: ignore[arg-type]
    del kept
    gc.collect()
    assert (nvml.opened, nvml.closed) == (5, 5)
    assert not [thread for thread in threading.enumerate() if thread.name == "fastpipe-gpu"]


def test_it_is_closed_at_the_end_of_the_interpreter() -> None:
    script = """
import sys
sys.path.insert(0, "tests/tools")
from types import SimpleNamespace
closed = []
def shutdown():
    print("closed", flush=True)
sys.modules["pynvml"] = SimpleNamespace(
    NVMLError=OSError, nvmlInit=lambda: None, nvmlShutdown=shutdown, NVML_PCIE_UTIL_RX_BYTES=1,
    nvmlDeviceGetHandleByIndex=lambda index: index, nvmlDeviceGetPcieThroughput=lambda handle, kind: 1,
    nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=1, memory=1),
)
import fastpipe
kept = iter(fastpipe.watch(range(9)))
next(kept)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "closed\n", "")


def test_what_a_device_does_not_tell_is_none(nvml: Nvml) -> None:
    nvml.tells_throughput = False
    nvml.rates = [(80, 40)]
    loader = fastpipe.watch(range(3))
    list(loader)
    assert loader.epochs[0].gpu_utilisation == 0.8 and loader.epochs[0].pcie_bytes_per_second is None
    nvml.tells_rates = False
    list(loader)
    assert loader.epochs[1].gpu_utilisation is None
    assert nvml.opened == nvml.closed == 2


@pytest.mark.parametrize("missing", ["has_driver", "has_device"])
def test_without_a_driver_or_a_device_there_is_nothing(nvml: Nvml, missing: str) -> None:
    setattr(nvml, missing, False)
    loader = fastpipe.watch(range(3))
    assert list(loader) == [0, 1, 2] and loader.epochs[0].gpu_utilisation is None
    assert nvml.opened == nvml.closed


def test_without_the_package_there_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert GPUSampler.begin() is None


def test_who_does_not_want_it_does_not_get_it(nvml: Nvml) -> None:
    list(fastpipe.watch(range(3), gpu=False))
    assert nvml.opened == 0


@pytest.mark.parametrize(
    ("visible", "handle"),
    [(None, 0), ("", 0), ("3", 3), ("2,1", 2), ("GPU-8932f937", "GPU-8932f937"), ("MIG-1", "MIG-1")],
    ids=str,
)
def test_the_device_is_the_first_that_the_process_may_use(
    nvml: Nvml, visible: str | None, handle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    list(fastpipe.watch(range(3)))
    assert nvml.handles == [handle]


@pytest.mark.parametrize(("has_uuid", "handle"), [(True, "GPU-b1c2"), (False, 5)])
def test_the_device_is_the_one_that_torch_computes_on(
    nvml: Nvml, has_uuid: bool, handle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = SimpleNamespace(uuid="b1c2") if has_uuid else SimpleNamespace()
    cuda = SimpleNamespace(
        is_initialized=lambda: True, current_device=lambda: 1, get_device_properties=lambda device: properties
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))  # type: ignore[arg-type]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    list(fastpipe.watch(range(3)))
    assert nvml.handles == [handle]
