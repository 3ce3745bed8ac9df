"""Imports all modules of fastpipe and uses each public class once: the child of ``test_no_compiler``.

``python everything_once.py torch|tf FOLDER``: all but ``fastpipe.tf``, or that alone.  It may start no process, and
write nowhere but below the folder.  Prints, as JSON, ``skipped`` modules with the packages they lack, and which
compilers were ``loaded``.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

_STARTED = ("subprocess.Popen", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system")
_WRITTEN = {"os.mkdir": 0, "os.rename": 1, "os.link": 1, "os.symlink": 1, "open": 0}
# What other packages try, and do without: Python's ``platform.processor``, matplotlib's fonts, which Keras loads, and
# the library that NVIDIA's ``cuda.pathfinder`` looks for.
_OF_OTHERS = ("['uname', '-p']", "['fc-list', '--help']", "['/sbin/ldconfig', '-p']", "['ld', '-t', ")
_touched: set[str] = set()
_started: list[str] = []


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    """Refuse to start a process, and note what is written."""
    if event in _STARTED:
        _refuse(event, *arguments)
    if event not in _WRITTEN or isinstance(path := arguments[_WRITTEN[event]], int):
        return
    if event != "open" or arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        folder, name = os.path.split(os.path.abspath(os.fsdecode(path)))
        if folder.startswith("/proc/self/fd/"):  # a stage is written to by way of its open folder
            folder = os.path.realpath(folder)
        _touched.add(os.path.join(folder, name))


def _refuse(*arguments: Any) -> None:
    """Answer as if there were no such program."""
    _started.append(repr(arguments))
    raise FileNotFoundError(f"a process is started: {arguments!r}")


def written_elsewhere(folder: Path) -> list[str]:
    """What was written, is there, and is neither below the folder nor a device."""
    allowed = (f"{folder}{os.sep}", "/dev/")
    return sorted(path for path in _touched if not path.startswith(allowed) and os.path.lexists(path))


def imported(is_wanted: Any) -> dict[str, str]:
    """Import modules; return those that lack a package that is not installed, with its name."""
    import fastpipe

    skipped: dict[str, str] = {}
    for module in _walked(fastpipe.__path__, "fastpipe.", is_wanted):
        try:
            importlib.import_module(module)
        except ImportError as error:
            missing = error.name if isinstance(error, ModuleNotFoundError) else None
            missing = missing or getattr(error.__cause__, "name", None)  # what is said with the pip command
            if missing is None or missing.split(".")[0] == "fastpipe":
                raise
            skipped[module] = missing
    return skipped


def _walked(paths: Iterable[str], before: str, is_wanted: Any) -> Iterator[str]:
    """Names of modules, without importing any."""
    for module in pkgutil.iter_modules(paths, before):
        if not is_wanted(module.name) or module.name.endswith(".__main__"):
            continue
        yield module.name
        if module.ispkg:
            below = [os.path.join(path, module.name.rpartition(".")[2]) for path in paths]
            yield from _walked(below, f"{module.name}.", is_wanted)


def check_all_used(module: ModuleType, made: Iterable[Any]) -> None:
    """Fail where a public class has no object among these, nor one of a subclass."""
    classes = {name for name in module.__all__ if isinstance(getattr(module, name), type)}
    unused = classes - {kind.__name__ for one in made for kind in type(one).__mro__}
    assert not unused, f"{module.__name__} has classes that are not used here: {sorted(unused)}"


# ---- torch ---------------------------------------------------------------------------------------


def use_loaders(folder: Path) -> None:
    """Datasets, loaders and their options."""
    import h5py
    import numpy as np
    from torchvision import transforms

    import fastpipe
    from fastpipe.bench import synthetic as testing

    photos = testing.photo_tree(folder / "photos", classes=2, per_class=2, sizes=(24, 32))
    testing.write_zarr(folder / "volume.zarr", [np.zeros((8, 8), np.uint16)], (8, 8), (4, 4))
    with h5py.File(folder / "rows.h5", "w") as file:
        file.create_dataset("x", data=np.ones((8, 4)), chunks=(2, 4), compression="gzip")
    options = (
        fastpipe.Cache("disk", dir=folder / "cache"), fastpipe.Stage(folder / "stage"), fastpipe.Subset(2),
        fastpipe.BadSamples("raise"), fastpipe.Decode(), fastpipe.Shuffle(), fastpipe.Shard(0, 1),
    )  # fmt: skip
    cache, stage, subset, bad, decode, shuffle, shard = options
    crop, policy = transforms.RandomResizedCrop(16), transforms.TrivialAugmentWide()
    policy = transforms.Compose([crop, policy, transforms.ToTensor()])
    images = fastpipe.FastImageFolder(
        photos, policy, cache=cache, stage=stage, classes=subset, bad_samples=bad, decode=decode
    )
    rows = fastpipe.FastHDF5Dataset(folder / "rows.h5", "x")
    patches = fastpipe.FastPatchDataset(folder / "volume.zarr", (4, 4))
    first = fastpipe.FastLoader(images, 2, shuffle, shard=shard, seed=0, augment="auto")
    loaders = [
        first,
        *(fastpipe.FastLoader(one, 2) for one in (fastpipe.FastImageFolder(photos, policy), rows, patches)),
    ]
    for loader in loaders:
        assert len(list(loader)) >= 2
    check_all_used(fastpipe, (*options, images, rows, patches, *loaders))


def use_augmentations(folder: Path) -> None:
    """All augmentations, of floats and, where they take them, of bytes."""
    import torch
    from augmentations import CHAINS, OPS, batch_for

    from fastpipe import augment
    from fastpipe.errors import AugmentError

    class Own(augment.BatchTransform):
        """Somebody's."""

        def on_tensors(self, images: Any, columns: Any, of_bytes: bool) -> Any:
            return 1 - images

    every = [Own(), CHAINS["fused"], *OPS.values()]
    torch.manual_seed(0)
    for op in every:
        floats = batch_for(op)
        more = [torch.arange(len(floats)) % 2] if getattr(op, "mixes", False) else []
        found = op(floats, *more)
        assert torch.isfinite(found[0] if more else found).all(), op
        if floats.ndim == 4 and floats.shape[1] == 3:
            with suppress(AugmentError):  # takes floats only
                op((255 * floats).to(torch.uint8), *more)
    check_all_used(augment, (*every, OPS["grey"].draw((4, 3, 16, 16))))


# ---- TensorFlow ----------------------------------------------------------------------------------


def use_tensorflow(folder: Path) -> None:
    """Datasets, the layer and the callback."""
    import numpy as np
    import tensorflow as tf

    from fastpipe import tf as fast
    from fastpipe.bench import synthetic as testing

    photos = testing.photo_tree(folder / "photos", classes=2, per_class=2, sizes=(24, 32))
    layer = fast.Augment(rotation=10, brightness=0.2, saturation=0.2, hue=0.1, cutout=0.5, zoom=0.1)
    images = fast.image_dataset(photos, image_size=(16, 16), batch_size=2, augment=layer, verbose=False)
    timer, model = (
        fast.EpochTimer(),
        tf.keras.Sequential([tf.keras.layers.Flatten(), tf.keras.layers.Dense(2)]),
    )
    model.compile("sgd", tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(timer.watch(images), verbose=0, callbacks=[timer])
    names = sorted(path.name for path in (photos / "class_000").iterdir())
    second = fast.Modality(folder=photos / "class_000", boxes=np.tile([1, 2, 20, 21], (len(names), 1)))
    tables = fast.image_dataset(
        names, np.arange(len(names)), folder=photos / "class_000", image_size=(16, 16), batch_size=2,
        modalities={"first": {}, "second": second},
    )  # fmt: skip
    assert len(list(tables)) == 1
    check_all_used(fast, (layer, images, tables, timer, timer.epochs[0], second))


def main(what: str, folder: Path) -> None:
    """Import, use, and look for what was written elsewhere."""
    import _posixsubprocess  # whose function the hook does not see

    sys.addaudithook(_watch)
    _posixsubprocess.fork_exec = _refuse
    if what == "tf":
        skipped = imported(lambda name: name.startswith("fastpipe.tf"))
        use_tensorflow(folder)
    else:
        skipped = imported(lambda name: not name.startswith("fastpipe.tf"))
        use_loaders(folder)
        use_augmentations(folder)
    started = [one for one in _started if not any(words in one for words in _OF_OTHERS)]
    assert not started, f"processes were started: {started}"
    elsewhere = written_elsewhere(folder)
    assert not elsewhere, f"files were written elsewhere: {elsewhere}"
    print(json.dumps({"skipped": skipped, "loaded": sorted({"numba", "llvmlite"} & set(sys.modules))}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]).resolve())
