"""The options of datasets and loaders: values that are checked when they are made, and do not change."""

from __future__ import annotations

import operator
import os
import sys
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any, Literal

import numpy as np

from fastpipe.errors import OptionError

__all__ = ["BadSamples", "Cache", "Decode", "Shard", "Shuffle", "Stage", "Subset"]


@dataclass(frozen=True)
class Decode:
    """How images are decoded.  ``scaled`` and ``short_side`` change pixels; with all other settings
    they are those that Pillow gives.

    Args:
        backend: ``"auto"`` decodes with libjpeg-turbo where that gives Pillow's pixels; the others name a
            decoder.  ``"dali"`` decodes the images of a batch
            by one run of a pipeline of NVIDIA DALI's, ``"pillow"`` decodes all with Pillow; ``"simplejpeg"``,
            of earlier versions, is as ``"auto"``.  Whatever a decoder cannot do like
            Pillow goes to Pillow in any case.  Where ``fastpipe.tf.image_dataset`` gives TensorFlow's
            pixels, ``"dali"`` gives those, and the others make no difference.
            With ``FastLoader(device="cuda")`` and no workers,
            ``"nvimgcodec"`` and ``"dali"`` decode and resample on the GPU, and there pixels differ a
            little from Pillow's.
        exif: turn images as their EXIF orientation says.  torchvision's ``ImageFolder``
            does not, so the default is off.
        scaled: decode a JPEG at a half, a quarter or an eighth of its size where what the transform uses
            of it is at least so many times as large as what it makes of that: less work for large
            photographs.  **Changes pixels.**
        short_side: make images whose shorter side is longer than this smaller first, as
            ``torchvision.transforms.Resize(short_side)`` does, whatever the transform does then.  **Changes
            pixels.**  For a cache: kept images take less room, and less work each time.
        max_pixels: refuse images with more pixels, before they are decoded.  ``None``
            means Pillow's policy (``PIL.Image.MAX_IMAGE_PIXELS``).
        gpu_share: which part of each batch's images is decoded on the GPU, from 0 to 1, evenly among the
            others, which the CPU decodes meanwhile.  ``"auto"`` measures: for a second, the training's steps
            are given batches of several shares, and the one with which they follow each other fastest stays;
            it is logged, and ``FastLoader.plan`` shows it.  Which images the GPU decodes, and so some pixels,
            then depends on the machine's speed; a number is the same in each run.  ``None`` is all of them
            for ``"nvimgcodec"`` and ``"dali"``, and none for ``"auto"``, which with a share decodes by
            nvImageCodec on the GPU.  Where nothing is decoded on a GPU it has no effect.

    >>> Decode(backend="pillow")
    Decode(backend='pillow')
    """

    backend: Literal["auto", "nvimgcodec", "simplejpeg", "pillow", "dali"] = "auto"
    exif: bool = False
    scaled: bool = False
    short_side: int | None = None
    max_pixels: int | None = None
    gpu_share: float | Literal["auto"] | None = None

    def __post_init__(self) -> None:
        _check_choice(
            "Decode(backend=…)", self.backend, ("auto", "nvimgcodec", "simplejpeg", "pillow", "dali")
        )
        side = self.short_side
        if side is not None and (not isinstance(side, int) or side <= 0):
            raise OptionError(f"Decode(short_side=…) must be a number of pixels from 1 or None, got {side!r}")
        if self.max_pixels is not None and self.max_pixels <= 0:
            raise OptionError(f"Decode(max_pixels=…) must be positive or None, got {self.max_pixels!r}")
        self._check_gpu_share()

    def _check_gpu_share(self) -> None:
        share = self.gpu_share
        is_number = isinstance(share, (int, float)) and not isinstance(share, bool)
        if share not in (None, "auto") and not (is_number and 0 <= share <= 1):  # type: ignore[operator]
            raise OptionError(
                f"Decode(gpu_share=…) must be a number from 0 to 1, 'auto' or None, got {share!r}"
            )
        if share is not None and self.backend in ("simplejpeg", "pillow"):
            raise OptionError(
                f"Decode(gpu_share=…) is for back ends that decode on a GPU, and {self.backend!r} does not: "
                "name 'nvimgcodec' or 'dali', or leave backend= out"
            )

    def __repr__(self) -> str:
        return _short_repr(self)


@dataclass(frozen=True)
class Cache:
    """Where decoded images, chunks or parts of volumes are kept, so that they are decoded once.

    What is kept is what was decoded, before the random part of a transform: results stay the
    same.  A file that changes is decoded again.  Nothing is ever evicted: what does not fit is
    decoded each time, as without a cache, and the same images are found in every epoch.

    Args:
        where: ``"ram"`` keeps images in memory; threads, worker processes and all processes of
            this user on the machine that ask for the same cache share it, and the last of them
            takes it along.  ``"disk"`` keeps them in files, for this run and later ones.
            ``"auto"`` is ``"ram"`` from a sample's second use on, and only where all samples fit.
            ``"off"`` keeps nothing.
        max_bytes: the most bytes to keep.  ``"auto"``: a quarter of the memory that is free
            (to the cgroup, in a container), or of the free disk, when the cache is made.
        dir: with ``"disk"``, an existing or new folder, in which a folder ``fastpipe-decoded``
            of mode 0700 is made.  Default: in the user's cache folder.

    Of volumes, parts are kept in memory within ``max_bytes``, from their first use on, and what is wanted
    least makes room for what is wanted now; there is no ``"disk"``.

    Wherever a ``Cache`` is accepted one of its four words is too.

    >>> Cache("ram", max_bytes=8 << 30)
    Cache(where='ram', max_bytes=8589934592)
    """

    where: Literal["auto", "ram", "disk", "off"] = "auto"
    max_bytes: int | Literal["auto"] = "auto"
    dir: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        _check_choice("Cache(where=…)", self.where, ("auto", "ram", "disk", "off"))
        _check_count(self, "max_bytes", "bytes", "; where='off' keeps nothing")
        if self.dir is not None:
            if self.where != "disk":
                raise OptionError(f"Cache(dir=…) is for where='disk'; got where={self.where!r}")
            object.__setattr__(self, "dir", os.path.abspath(os.path.expanduser(self.dir)))

    @classmethod
    def of(cls, value: Cache | str) -> Cache:
        """Accept an object or a word for it."""
        return value if isinstance(value, cls) else cls(where=value)  # type: ignore[arg-type]

    def __repr__(self) -> str:
        return _short_repr(self)


@dataclass(frozen=True)
class BadSamples:
    """What happens to a sample whose file cannot be read or decoded.

    An error of a transform is an error of the script, and is raised whatever the policy.

    Args:
        policy: ``"raise"`` stops with an error that names path and index; ``"replace"``
            puts another sample of the same class in its place; ``"skip"`` leaves it out.
            ``FastLoader`` with threads then fills the batch with the samples that follow;
            from worker processes, and in a stock ``DataLoader``, the batch is shorter.
        log: file that gets one JSON line for each bad sample.  ``None`` only logs a
            warning through ``logging``.
        max_errors: stop with an error once more different samples than this are bad, in any
            one process.  ``None`` never does.

    Wherever a ``BadSamples`` is accepted its policy's name is too.

    >>> BadSamples("replace", max_errors=100)
    BadSamples(policy='replace', max_errors=100)
    """

    policy: Literal["raise", "replace", "skip"] = "raise"
    log: str | os.PathLike[str] | None = None
    max_errors: int | None = None

    def __post_init__(self) -> None:
        _check_choice("BadSamples(policy=…)", self.policy, ("raise", "replace", "skip"))
        if self.max_errors is not None and self.max_errors < 0:
            raise OptionError(f"BadSamples(max_errors=…) must be ≥ 0 or None, got {self.max_errors!r}")

    @classmethod
    def of(cls, value: BadSamples | str) -> BadSamples:
        """Accept an object or a policy's name."""
        return value if isinstance(value, cls) else cls(policy=value)  # type: ignore[arg-type]

    def __repr__(self) -> str:
        return _short_repr(self)


@dataclass(frozen=True)
class Shuffle:
    """How an epoch is shuffled, where ``shuffle=True`` is not what is wanted.

    Args:
        window: with groups, so many of them are mixed at a time; None takes as many as are 32 MB decoded.
            Of volumes, patches come from so many places in turn; None takes as many as decode little more
            than is used.
        unit: ``"sample"`` shuffles samples, each order as likely as any other, which is what
            ``shuffle=True`` does.  ``"group"`` shuffles the groups of samples that are cheap to read
            together, such as the chunks of an HDF5 file, and then the samples of each ``window``
            groups: each group is read once, while it is in memory.  **Changes the order's statistics**:
            two samples of a batch are of the same group with probability up to 1 / ``window``,
            instead of 1 / groups.

    >>> Shuffle(window=64, unit="group")
    Shuffle(window=64, unit='group')
    """

    window: int | None = None
    unit: Literal["sample", "group"] = "sample"

    def __post_init__(self) -> None:
        _check_choice("Shuffle(unit=…)", self.unit, ("sample", "group"))
        if self.window is None:
            return
        if _as_integer(self, "window", "an integer or None") < 1:
            raise OptionError(f"Shuffle(window=…) must be at least 1, got {self.window}")
        if self.unit != "group":
            raise OptionError("Shuffle(window=…) counts groups: give unit='group' with it")

    def __repr__(self) -> str:
        return _short_repr(self)


@dataclass(frozen=True)
class Shard:
    """One rank's part of each epoch.

    Args:
        rank: this process's number, from 0.
        world: number of processes that share an epoch.
        mode: ``"train"``: equally many batches of equal sizes on each rank, for which fewer
            samples than there are ranks may come twice.  ``"eval"``: every sample exactly
            once, equally many batches on each rank, whose sizes differ by at most one.

    >>> Shard(1, 4)
    Shard(rank=1, world=4, mode='train')
    """

    rank: int
    world: int
    mode: Literal["train", "eval"] = "train"

    def __post_init__(self) -> None:
        for name in ("rank", "world"):
            _as_integer(self, name)
        if self.world < 1:
            raise OptionError(f"Shard(world=…) must be at least 1, got {self.world}")
        if not 0 <= self.rank < self.world:
            raise OptionError(
                f"Shard(rank=…) must be from 0 to world - 1 = {self.world - 1}, got {self.rank}"
            )
        _check_choice("Shard(mode=…)", self.mode, ("train", "eval"))

    @classmethod
    def auto(cls, mode: Literal["train", "eval"] = "train") -> Shard:
        """The shard of this process as ``torch.distributed`` says, where it is initialised, else the
        launcher's ``RANK`` and ``WORLD_SIZE``; without either, everything.

        Raises:
            OptionError: only one of the two variables is set, or one is not a number.
        """
        distributed = sys.modules.get("torch.distributed")  # whoever initialised it has imported it
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            return cls(distributed.get_rank(), distributed.get_world_size(), mode)
        rank, world = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
        if rank is None and world is None:
            return cls(0, 1, mode)
        try:
            return cls(int(rank or ""), int(world or ""), mode)
        except ValueError:
            raise OptionError(
                f"Shard.auto() found RANK={rank!r} and WORLD_SIZE={world!r} in the environment, which are no "
                "two numbers of one launcher: unset them, or give Shard(rank, world)"
            ) from None


@dataclass(frozen=True)
class Stage:
    """A folder on a local disk to which remote files are copied near, just before they are needed.

    Threads, worker processes and ranks of a machine share it, and each file is downloaded once.  Where all
    fits, nothing is downloaded again; else what is needed last makes room for what is needed next.  It may
    be lost, full or read-only at any time: then files come from where they are.

    Args:
        dir: an existing or new folder, in which a folder ``fastpipe-stage`` of mode 0700 is made.
        max_bytes: the most bytes to keep there.  ``"auto"``: what is there, and nine tenths of what is free
            on the disk, when the stage is opened.
        mode: ``"prefetch"`` copies what the next batches need; ``"mirror"`` everything, as fast as the
            store gives it.
        connections: requests that are under way at a time, at most.  ``"auto"`` follows what latency and
            bandwidth are measured to need, up to 128.
        read_ahead: bytes that are fetched before they are used, at most.  ``"auto"`` is an eighth of the
            free memory, at most 256 MiB.

    Wherever a ``Stage`` is accepted its folder is too.

    >>> Stage("/nvme/stage", max_bytes=200 << 30)
    Stage(dir='/nvme/stage', max_bytes=214748364800)
    """

    dir: str | os.PathLike[str]
    _: KW_ONLY
    max_bytes: int | Literal["auto"] = "auto"
    mode: Literal["prefetch", "mirror"] = "prefetch"
    connections: int | Literal["auto"] = "auto"
    read_ahead: int | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        _check_choice("Stage(mode=…)", self.mode, ("prefetch", "mirror"))
        object.__setattr__(self, "dir", os.path.abspath(os.path.expanduser(self.dir)))
        for name, unit in (("max_bytes", "bytes"), ("connections", "requests"), ("read_ahead", "bytes")):
            _check_count(self, name, unit)

    @classmethod
    def of(cls, value: Stage | str | os.PathLike[str]) -> Stage:
        """Accept an object or a folder."""
        return value if isinstance(value, cls) else cls(value)  # type: ignore[arg-type]

    def __repr__(self) -> str:
        return _short_repr(self)


@dataclass(frozen=True)
class Subset:
    """Some classes of a dataset, drawn by a seed.

    The classes are sorted by name, then shuffled by NumPy's ``RandomState(seed).permutation``, whose values
    are the same in every version; the first ``num`` of them are taken, and sorted again.  The same seed
    draws the same classes of the same dataset; a larger ``num`` adds classes to those of a smaller one.

    Args:
        num: how many classes.
        seed: from 0 to 2**32 - 1.

    >>> Subset(num=2, seed=42).select(["ant", "bee", "cat", "dog"])
    ['bee', 'dog']
    """

    num: int
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("num", 1), ("seed", 0)):
            if not least <= (value := _as_integer(self, name)) < 1 << 32:
                raise OptionError(f"Subset({name}=…) must be from {least} to 2**32 - 1, got {value}")

    def select(self, names: Sequence[str]) -> list[str]:
        """The classes drawn of these.

        Raises:
            OptionError: there are fewer.
        """
        if self.num > len(names):
            raise OptionError(f"Subset(num={self.num}) asks for more classes than the {len(names)} there are")
        found = sorted(names)
        order = np.random.RandomState(self.seed).permutation(len(found))
        return sorted(found[number] for number in order[: self.num].tolist())


def _as_integer(option: Any, name: str, kind: str = "an integer") -> int:
    """Make a field an ``int``, and return it."""
    value = getattr(option, name)
    try:
        number = operator.index(value)
    except TypeError:
        raise OptionError(f"{type(option).__name__}({name}=…) must be {kind}, got {value!r}") from None
    object.__setattr__(option, name, number)
    return number


def _check_count(option: Any, name: str, unit: str, remedy: str = "") -> None:
    """Let a field be ``"auto"`` or a positive number."""
    if getattr(option, name) == "auto":
        return
    if (value := _as_integer(option, name, f"'auto' or a number of {unit}")) <= 0:
        raise OptionError(f"{type(option).__name__}({name}=…) must be positive, got {value}{remedy}")


def _check_choice(what: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise OptionError(f"{what} must be one of {', '.join(map(repr, choices))}; got {value!r}")


def _short_repr(option: Any) -> str:
    """The repr of a dataclass with only those fields that differ from their defaults."""
    changed = [
        f"{field.name}={getattr(option, field.name)!r}"
        for field in fields(option)
        if getattr(option, field.name) != field.default or field.name in ("policy", "where")
    ]
    return f"{type(option).__name__}({', '.join(changed)})"
