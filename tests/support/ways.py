"""One batch of a kind of data, with the files of fastpipe's whose functions run on its way: ``python ways.py KIND``."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import fastpipe

_ROOT = os.path.dirname(fastpipe.__file__) + os.sep


class Crossed:
    """Within the block, the modules of fastpipe in which a function is called, in any thread begun since."""

    def __init__(self) -> None:
        self.modules: set[str] = set()

    def _see(self, frame: Any, event: str, _: object) -> None:
        if event == "call" and (module := _module(frame)) is not None and module not in self.modules:
            caller = frame
            while caller is not None:  # what an import calls is on nobody's way
                if caller.f_code.co_name == "<module>" and _module(caller) is not None:
                    return
                caller = caller.f_back
            self.modules.add(module)

    def __enter__(self) -> Crossed:
        threading.setprofile(self._see)
        sys.setprofile(self._see)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


def _module(frame: Any) -> str | None:
    file = frame.f_code.co_filename
    return file[len(_ROOT) :] if file.startswith(_ROOT) else None


def _photos(folder: Path) -> str:
    from fastpipe.bench.synthetic import photo_tree

    return str(photo_tree(folder / "photos", classes=2, per_class=8, sizes=(80, 100)))


def _second_batch(dataset: Any) -> set[str]:
    from fastpipe import FastLoader

    iterator = iter(FastLoader(dataset, batch_size=4, shuffle=True))
    next(iterator)
    with Crossed() as crossed:
        next(iterator)
    return crossed.modules


def image(folder: Path) -> set[str]:
    """A JPEG by ``FastImageFolder``."""
    from torchvision import transforms

    from fastpipe import FastImageFolder

    crop = transforms.Compose([transforms.RandomResizedCrop(32), transforms.ToTensor()])
    return _second_batch(FastImageFolder(_photos(folder), crop))


def row(folder: Path) -> set[str]:
    """A row of an HDF5 file by ``FastHDF5Dataset``."""
    import h5py

    from fastpipe import FastHDF5Dataset

    with h5py.File(folder / "rows.h5", "w") as file:
        file.create_dataset("x", data=np.ones((64, 16), "f4"), chunks=(8, 16), compression="gzip")
    return _second_batch(FastHDF5Dataset(str(folder / "rows.h5"), "x"))


def patch(folder: Path) -> set[str]:
    """A patch of a Zarr array by ``FastPatchDataset``."""
    from fastpipe import FastPatchDataset, sampling
    from fastpipe.bench.synthetic import write_zarr

    write_zarr(folder / "volume.zarr", [np.zeros((64, 64, 64), np.uint16)], (64, 64, 64), (16, 16, 16))
    dataset = FastPatchDataset(str(folder / "volume.zarr"), (16, 16, 16), sampling=sampling.Uniform(64))
    return _second_batch(dataset)


def tensorflow(folder: Path) -> set[str]:
    """A JPEG by ``fastpipe.tf.image_dataset``."""
    import tensorflow as tf

    import fastpipe.tf

    crossed = Crossed()
    made = tf.data.Dataset.from_generator

    def from_generator(generate: Callable[[], Iterator[Any]], **options: Any) -> Any:
        def watched() -> Iterator[Any]:
            iterator = generate()
            while True:
                with crossed:  # in TensorFlow's thread
                    element = next(iterator, None)
                if element is None:
                    return
                yield element

        return made(watched, **options)

    tf.data.Dataset.from_generator = from_generator
    dataset = fastpipe.tf.image_dataset(_photos(folder), image_size=(32, 32), batch_size=4)
    assert len(list(dataset)) == 4
    return crossed.modules


def profile(folder: Path) -> set[str]:
    """A profile of a script's own loader."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    loader = DataLoader(TensorDataset(torch.zeros(256, 4)), batch_size=4)
    with Crossed() as crossed:
        str(fastpipe.profile(loader, seconds=0.2))
    return crossed.modules


def bench(folder: Path) -> set[str]:
    """A benchmark's case."""
    from fastpipe.cli import main

    argv = ["bench", "images", "--quick", "--data", _photos(folder)]
    with contextlib.redirect_stdout(io.StringIO()), Crossed() as crossed:
        assert main(argv) == 0
    return crossed.modules


if __name__ == "__main__":
    kind = {one.__name__: one for one in (image, row, patch, tensorflow, profile, bench)}[sys.argv[1]]
    with tempfile.TemporaryDirectory() as name:
        print(json.dumps(sorted(kind(Path(name)))))
