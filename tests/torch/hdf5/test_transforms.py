"""``transform`` and ``target_transform``: what they are called with, where, and with which random numbers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from failure import failure
from same import same
from torch.utils.data import DataLoader, Subset
from torchvision.transforms import v2

from fastpipe import FastHDF5Dataset, FastLoader

pytestmark = pytest.mark.usefixtures("same_generators")


class Noise:
    """User code that draws from every global generator."""

    def __call__(self, value: Any) -> Any:
        drawn = random.random() + np.random.random() + torch.rand(()).item()
        return torch.from_numpy(np.array(value, np.float64)) + drawn


def jitter(target: Any) -> Any:
    return float(target) + torch.rand(()).item() + np.random.random()


SAFE = v2.Compose([v2.ToImage(), v2.RandomHorizontalFlip(), v2.RandomErasing(p=0.5)])
USES: dict[str, Any] = {
    "safe": (["grid", "label"], {"transform": SAFE}),
    "scalar": ("label", {"transform": Noise()}),
    "targets": (["mels", "label"], {"target_transform": jitter}),
    "both": (["grid", "label"], {"transform": SAFE, "target_transform": jitter}),
    "both, users": (["grid", "label", "code"], {"transform": Noise(), "target_transform": jitter}),
}


def epochs(loader: Any, count: int = 2) -> list[Any]:
    return [batch for _ in range(count) for batch in loader]


@pytest.mark.few(3)
@pytest.mark.parametrize("use", USES)
def test_a_seed_fixes_the_values_on_any_topology(file: Path, use: str) -> None:
    keys, code = USES[use]
    streams = []
    for threads, workers in ((1, 0), (3, 0), (1, 2)):
        dataset = FastHDF5Dataset(file, keys, seed=5, threads=threads, **code)
        before = torch.get_rng_state(), random.getstate(), np.random.get_state()[2]
        streams.append(epochs(FastLoader(dataset, 8, shuffle=True, num_workers=workers, workers="processes")))
        if not workers:
            assert torch.equal(torch.get_rng_state(), before[0])
            assert (random.getstate(), np.random.get_state()[2]) == before[1:]
    assert all(same(stream, streams[0]) for stream in streams)
    assert not same(streams[0][:7], streams[0][7:])


def test_transforms_get_the_values_that_h5py_gives(file: Path) -> None:
    seen: list[Any] = []

    def look(value: Any) -> Any:
        seen.append(value)
        return value

    sample = FastHDF5Dataset(file, ["mels", "label", "text"], transform=look, target_transform=look)[4]
    assert type(sample) is tuple
    mel, label, text = sample
    assert (mel.dtype, mel.shape, int(label), text) == (np.float32, (6, 10), 4, b"text 4")
    assert list(FastHDF5Dataset(file, {"a": "mels", "b": "label"}, transform=look)[4]) == ["a", "b"]
    assert int(FastHDF5Dataset(file, "label", transform=look)[4]) == 4
    assert [type(value) for value in seen] == [np.ndarray, np.int64, dict, np.int64]
    seen.clear()
    list(DataLoader(FastHDF5Dataset(file, "mels", transform=look), 8))
    assert {type(value) for value in seen} == {np.ndarray}


def test_a_transform_may_change_its_value_in_place(file: Path) -> None:
    def spoil(mel: Any) -> Any:
        mel += 1000
        return mel

    for cache in ("off", "ram"):
        dataset = FastHDF5Dataset(file, "mels", transform=spoil, cache=cache)  # type: ignore[arg-type]
        first, second = (torch.cat(list(FastLoader(dataset, 8))) for _ in range(2))
        assert same(first, second)
        assert same(torch.cat(list(FastLoader(FastHDF5Dataset(file, "mels"), 8))) + 1000, first)


class WrongError(Exception):
    """An error of the script's own."""


def fail(value: Any) -> Any:
    if (np.asarray(value) == 17).all():
        raise WrongError("no such word")
    return value


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(("safe", "policy"), [(False, "raise"), (True, "skip")])
def test_an_error_of_a_thread_or_target_names_it(file: Path, workers: int, safe: bool, policy: Any) -> None:
    """Under every policy: it is an error of the script."""
    for options in (
        {"keys": "label", "transform": fail, "thread_safe": safe},
        {"keys": ["mels", "label"], "target_transform": fail},
    ):
        dataset = FastHDF5Dataset(file, bad_samples=policy, threads=2, **options)  # type: ignore[arg-type]
        loader = FastLoader(Subset(dataset, range(10, 30)), 4, num_workers=workers, workers="processes")
        note = f"while making sample 17 from '{file}'"
        error = failure(lambda loader=loader: list(loader), WrongError)
        assert "no such word" in str(error)
        assert note in (
            str(error) if workers else error.__notes__
        )  # torch makes a worker's anew, of its text
        assert note in failure(lambda dataset=dataset: dataset[17], WrongError).__notes__
