"""What ``test_state_of_others.py`` runs in a process of its own: prints, as JSON, what each operation changed.

Each is done twice, once by fastpipe and once by what it stands for, from the same seeds.  What both change is
the replaced object's own: torch's ``DataLoader`` takes a number from torch's generator for each epoch.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import locale
import logging
import multiprocessing
import os
import random
import resource
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageFile
from torch.utils.data import DataLoader, Subset
from torchvision import get_image_backend, transforms
from torchvision.datasets import ImageFolder

TRANSFORM = transforms.Compose([transforms.Resize(32), transforms.CenterCrop(32), transforms.ToTensor()])
# What importing fastpipe may load: packages of its own extras that no dataset here is of must not be there.
HEAVY = {
    "IPython", "blosc2", "dask", "distributed", "joblib", "keras", "matplotlib", "nibabel", "pandas", "s3fs",
    "tensorflow", "tifffile", "zarr",
}  # fmt: skip


def own(*values: Any) -> Any:
    """A transform that fastpipe does not know, and that draws nothing."""
    return torch.zeros(1)


OPTIONS: dict[str, dict[str, Any]] = {
    "": {}, " of an own transform": {"transform": own},
    " of an own transform in threads": {"transform": own, "thread_safe": True},
    " that are replaced": {"bad_samples": "replace", "cache": "off"},
}  # fmt: skip


def datasets(path: Path) -> Iterator[tuple[str, Any, Any]]:
    """Datasets that draw nothing, with their names and the stock ones."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
    from dataset_kinds import KINDS

    for name in ("images", "rows", "patches of Zarr"):
        folder = path / "kinds" / name
        folder.mkdir(parents=True)
        KINDS[name].write(folder)
        stock = KINDS[name].stock(folder)
        stock[0]
        for more, options in OPTIONS.items():
            yield name + more, KINDS[name].fast(folder, **options), stock


def generators() -> dict[str, Any]:
    """The global random generators' states."""
    name, words, *rest = np.random.get_state()
    return {
        "torch": (torch.get_rng_state().tolist(), torch.initial_seed()),
        "torch on GPUs": (torch.cuda.is_initialized(), len(torch.cuda._lazy_seed_tracker.get_calls())),
        "NumPy": (name, words.tolist(), *rest),
        "random": random.getstate(),
    }


def snapshot() -> dict[str, Any]:
    """All that is global in a process and that a loader has no business with, by its name."""
    h5py = sys.modules["h5py"].get_config() if "h5py" in sys.modules else None
    mask = os.umask(0)
    os.umask(mask)
    wakeup = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup)
    loggers = {
        name: (one.level, list(one.handlers), one.filters, one.propagate, one.disabled)
        for name, one in logging.root.manager.loggerDict.items()
        if isinstance(one, logging.Logger)
        and not all(isinstance(n, logging.NullHandler) for n in one.handlers)
    }
    return {
        "torch's default type and device": (torch.get_default_dtype(), torch.get_default_device()),
        "torch's modes": (
            torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu"),
            torch.is_anomaly_enabled(), torch._C._len_torch_function_stack(),
        ),
        "torch's flags": (
            torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark,
            torch.backends.cudnn.deterministic, torch.backends.mkldnn.enabled, torch.get_float32_matmul_precision(),
            torch.utils.deterministic.fill_uninitialized_memory,
        ),
        "torch's threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "print options": (str(vars(torch._tensor_str.PRINT_OPTS)), np.get_printoptions()),
        "torch's collate": {
            kind: made for kind, made in torch.utils.data._utils.collate.default_collate_fn_map.items()
            if not getattr(kind, "__module__", "").startswith("fastpipe.")
        },
        "torch's sharing": (torch.multiprocessing.get_sharing_strategy(), multiprocessing.get_start_method(True)),
        "NumPy's errors": (np.geterr(), np.geterrcall()),
        "environment": dict(os.environ),
        "warnings": (warnings.filters[:], warnings.showwarning, warnings.formatwarning, warnings._showwarnmsg_impl),
        # The handler of SIGCHLD is torch's, which reports that a worker died; fastpipe's names its last file.
        "signals": {s: signal.getsignal(s) for s in signal.valid_signals() if s != signal.SIGCHLD},
        "signals that wait": (signal.pthread_sigmask(signal.SIG_BLOCK, []), wakeup, signal.getitimer(signal.ITIMER_REAL)),
        "faulthandler": faulthandler.is_enabled(),
        "import": (sys.path[:], sys.meta_path[:], sys.path_hooks[:], sys.dont_write_bytecode),
        "heavy modules": sorted(HEAVY & set(sys.modules)),
        "sys": (sys.argv[:], sys.stdin, sys.stdout, sys.stderr, sys.getswitchinterval(), sys.getrecursionlimit()),
        "hooks": (
            sys.excepthook, sys.unraisablehook, threading.excepthook, sys.displayhook, sys.breakpointhook,
            sys.gettrace(), sys.getprofile(), threading.gettrace(), threading.getprofile(), sys.get_asyncgen_hooks(),
        ),
        "logging": (
            logging.root.level, logging.root.handlers[:], logging.root.manager.disable, logging.lastResort,
            logging.getLoggerClass(), logging.getLogRecordFactory(), logging.raiseExceptions, logging._warnings_showwarning,
        ),
        "loggers": {name: one for name, one in loggers.items() if one != (0, [], [], True, False)},
        "locale": (locale.setlocale(locale.LC_ALL), time.tzname),
        "process": (
            mask, os.getcwd(), os.getpriority(os.PRIO_PROCESS, 0), os.sched_getaffinity(0),
            {name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")},
        ),
        "garbage": (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count(), gc.get_debug(), gc.callbacks[:]),
        "Pillow": (
            Image.MAX_IMAGE_PIXELS, Image.WARN_POSSIBLE_FORMATS, ImageFile.LOAD_TRUNCATED_IMAGES, ImageFile.MAXBLOCK,
            Image._initialized, Image.ID[:], dict(Image.OPEN), dict(Image.EXTENSION), get_image_backend(),
        ),
        "h5py": [getattr(h5py, name, None) for name in ("complex_names", "bool_names", "track_order")],
        # Without those of fastpipe's pools, and of queues to torch's workers, which end a moment after these.
        "threads": sorted(
            one.name for one in threading.enumerate()
            if not one.name.startswith(("fastpipe-", "QueueFeederThread"))
        ),
        "processes": len(multiprocessing.active_children()),
    }  # fmt: skip


def changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What differs, in words."""
    found = []
    for name, value in before.items():
        new = after[name]
        if isinstance(value, dict) and value != new:
            keys = [key for key in {**value, **new} if value.get(key) != new.get(key)]
            found += [f"{name} {key}: {value.get(key)} → {new.get(key)}" for key in keys]
        elif value != new:
            found.append(f"{name}: {str(value)[:200]} → {str(new)[:200]}")
    return found


def seeded(work: Callable[[], object]) -> dict[str, Any]:
    """The generators' states after this, from the same seeds."""
    torch.manual_seed(5)
    np.random.seed(6)
    random.seed(7)
    work()
    return generators()


def two_epochs(loader: Any) -> None:
    """Two epochs, one of them broken off, with something that is drawn in the loop."""
    for number, _ in enumerate(loader):
        torch.rand(1)
        if number == 1:
            break
    for _ in loader:
        torch.rand(1)


def failing(loader: Any) -> None:
    """An epoch that ends with an error."""
    with suppress(Exception):
        list(loader)


def main(folder: str) -> None:
    found: dict[str, list[str]] = {}
    path = Path(folder)
    for folder_name, end in (("images/a", "jpg"), ("images/b", "jpg"), ("bad/a", "png")):
        (path / folder_name).mkdir(parents=True)
        for number in range(6):
            Image.new("RGB", (40, 40), (number, 9, 9)).save(path / folder_name / f"{number}.{end}")
    (path / "bad" / "a" / "3.png").write_bytes(b"no image")
    stock = ImageFolder(path / "images", TRANSFORM)
    # What torch does once in a process: its handler of SIGCHLD, Pillow's plugins, the start method.
    good = ImageFolder(path / "bad", TRANSFORM, is_valid_file=lambda name: "3" not in os.path.basename(name))
    list(DataLoader(good, 2, num_workers=1))

    def step(name: str, ours: Any, theirs: Any = lambda: None, draws: tuple[str, ...] = ()) -> None:
        expected, before = seeded(theirs), snapshot()
        after = seeded(ours)
        expected |= {generator: after[generator] for generator in draws}
        found[name] = changed(expected, after) + changed(before, snapshot())

    def imported() -> None:
        import fastpipe
        import fastpipe.generation
        import fastpipe.tools

        for name in fastpipe.__all__:
            getattr(fastpipe, name)

    step("import", imported)
    import fastpipe
    from fastpipe import FastImageFolder, FastLoader, FastPatchDataset, accelerate

    step("images are found", lambda: FastImageFolder(path / "images", TRANSFORM), lambda: stock)
    step("images are listed", lambda: FastImageFolder.from_samples(stock.samples, TRANSFORM))
    for kind, dataset, same in list(datasets(path)):
        step(f"{kind}: one", lambda: dataset[1])
        step(f"{kind}: several", lambda: dataset.__getitems__([3, 1, 2]))
        step(f"{kind}: described", lambda: (str(dataset.plan), repr(dataset)))
        for loader in (DataLoader, FastLoader):
            step(
                f"{kind}: epochs of {loader.__name__}", lambda: two_epochs(loader(dataset, 4, shuffle=True)),
                lambda: two_epochs(DataLoader(same, 4, shuffle=True)),
            )  # fmt: skip
        step(
            f"{kind}: a reference",
            lambda: list(FastLoader(dataset, 4).reference()),
            lambda: list(DataLoader(same, 4)),
        )
    dataset = FastImageFolder(path / "images", TRANSFORM)
    loaders: dict[str, Any] = {
        "workers": lambda: FastLoader(dataset, 4, shuffle=True, num_workers=2),
        "a stock loader's workers": lambda: DataLoader(dataset, 4, shuffle=True, num_workers=1),
        "workers that stay": lambda: FastLoader(dataset, 4, shuffle=True, num_workers=1, persistent_workers=True),
        "workers of which there are as many as help": lambda: FastLoader(dataset, 4, shuffle=True, num_workers="auto"),
        "accelerate": lambda: accelerate(DataLoader(stock, 4, shuffle=True)),
        "accelerate, workers": lambda: accelerate(DataLoader(stock, 4, shuffle=True, num_workers=1)),
        "accelerate, an own dataset": lambda: accelerate(DataLoader(Subset(stock, range(12)), 4, shuffle=True)),
        "watch": lambda: fastpipe.watch(DataLoader(stock, 4, shuffle=True)),
    }  # fmt: skip
    for name, make in loaders.items():
        stays = {"num_workers": 1, "persistent_workers": True} if name == "workers that stay" else {}
        step(
            name, lambda: two_epochs(make()), lambda: two_epochs(DataLoader(stock, 4, shuffle=True, **stays))
        )
    drawn = transforms.Compose(
        [transforms.RandomResizedCrop(8), transforms.RandomInvert(), transforms.ToTensor()]
    )
    random_images = FastImageFolder(path / "images", drawn)
    # Other numbers than ImageFolder's transforms draw, from torch's generator alone; under a FastLoader none, as
    # with workers.
    step("random images: several", lambda: random_images.__getitems__([1, 2]), draws=("torch",))
    step(
        "random images: epochs", lambda: two_epochs(FastLoader(random_images, 4, shuffle=True)),
        lambda: two_epochs(DataLoader(stock, 4, shuffle=True)),
    )  # fmt: skip
    step("random patches: one", lambda: FastPatchDataset(np.zeros((6, 8, 4)), (2, 2, 4))[1], draws=("torch",))
    bad, stock_bad = (kind(path / "bad", TRANSFORM) for kind in (FastImageFolder, ImageFolder))
    step(
        "an error", lambda: failing(FastLoader(bad, 1, shuffle=True)),
        lambda: failing(DataLoader(stock_bad, 1, shuffle=True)),
    )  # fmt: skip
    step("an error of one", lambda: failing(bad))

    def resumed() -> None:
        loader, again = (FastLoader(dataset, 4, shuffle=True, seed=1) for _ in range(2))
        next(iter(loader))
        again.load_state_dict(loader.state_dict())

    step("a state", resumed)

    def profiled() -> None:
        with fastpipe.profile() as profiling:
            two_epochs(DataLoader(stock, 4, shuffle=True))
        str(profiling.report)

    step("profile", profiled, lambda: two_epochs(DataLoader(stock, 4, shuffle=True)))
    step("profile of a loader", lambda: fastpipe.profile(DataLoader(stock, 4), seconds=0.1), draws=("torch",))
    step("autotune", lambda: fastpipe.autotune(FastLoader(dataset, 4), seconds=0.2))
    options: dict[str, Any] = {"seed": 1, "workers": 1, "progress": False}
    step("generate", lambda: fastpipe.generate(lambda n, rng: rng.random(3), 8, path / "g.h5", **options))
    kept = fastpipe.memoize(dir=path / "kept")(lambda number: number + 1)
    step("memoize", lambda: (kept(1), kept(1)))
    print(json.dumps([{name: what for name, what in found.items() if what}, len(found)]))


if __name__ == "__main__":
    main(sys.argv[1])
