"""Options of datasets and loaders: immutable values, checked when they are constructed."""

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
    """Settings for decoding images.  ``scaled`` and ``short_side`` change pixels; all other settings
    give the same pixels as Pillow.

    Args:
        backend: ``"auto"`` decodes with libjpeg-turbo where its pixels equal Pillow's; the others name a
            decoder.  ``"dali"`` decodes the images of a batch in one run of an NVIDIA DALI pipeline,
            and ``"pillow"`` decodes all images with Pillow.  ``"simplejpeg"``, kept from earlier versions,
            equals ``"auto"``.  Every decoder falls back to Pillow for images that it cannot decode
            exactly as Pillow does.  Where ``fastpipe.tf.image_dataset`` gives TensorFlow's pixels,
            ``"dali"`` gives the same ones, and the other values make no difference.
            With ``FastLoader(device="cuda")`` and no workers, ``"nvimgcodec"`` and ``"dali"`` decode and
            resample on the GPU; pixels then differ slightly from Pillow's.
        exif: apply the EXIF orientation.  Off by default, because torchvision's ``ImageFolder`` ignores it.
        scaled: decode a JPEG at 1/2, 1/4 or 1/8 of its size if the region that the transform reads is at
            least 2, 4 or 8 times as large as the transform's output.  Saves work for large photographs.
            **Changes pixels.**
        short_side: pixels; first shrink images whose shorter side is longer, as
            ``torchvision.transforms.Resize(short_side)`` does, before any transform.  **Changes
            pixels.**  Useful with a cache: cached images take less memory, and less work in each epoch.
        max_pixels: refuse images with more pixels, before they are decoded.  ``None``
            applies Pillow's policy (``PIL.Image.MAX_IMAGE_PIXELS``).
        gpu_share: fraction of each batch's images to decode on the GPU, from 0 to 1, spread evenly over the
            batch; the CPU decodes the others meanwhile.  ``"auto"`` measures: for a second, the training
            steps get batches of several shares, and the share with the fastest steps is used from then on.
            It is logged, and ``FastLoader.plan`` shows it.  With ``"auto"``, the machine's speed decides
            which images the GPU decodes, and so some pixels; a number gives the same images in each run.
            ``None`` means all images for ``"nvimgcodec"`` and ``"dali"``, and none for ``"auto"``.  With a
            share, ``"auto"`` uses nvImageCodec on the GPU.  No effect if nothing is decoded on a GPU.

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
    """The place where decoded images, chunks or parts of volumes are kept, so that they are decoded once.

    The cache holds data as decoded, before the random part of a transform, so results do not
    change.  A file that changes is decoded again.  Nothing is evicted: images that do not fit are
    decoded in every epoch, as without a cache, and the same images are cache hits in every epoch.

    Args:
        where: ``"ram"`` keeps images in memory.  Threads, worker processes and all processes of
            this user on the machine that use the same cache share it, and the last of them
            releases it.  ``"disk"`` keeps images in files, for this run and later ones.
            ``"auto"`` is ``"ram"`` from a sample's second use on, and only if all samples fit.
            ``"off"`` keeps nothing.
        max_bytes: maximum size in bytes.  ``"auto"``: a quarter of the memory that is free
            (to the cgroup, in a container), or of the free disk, when the cache is created.
        dir: with ``"disk"``, an existing or new folder; the cache creates a folder ``fastpipe-decoded``
            of mode 0700 in it.  Default: in the user's cache folder.

    For volumes, parts are kept in memory within ``max_bytes``, from their first use on; the least wanted
    parts are evicted when room is needed.  ``"disk"`` is not available for volumes.

    One of the four words is accepted wherever a ``Cache`` is.

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
                raise OptionError(f"Cache(dir=…) applies to where='disk' only; got where={self.where!r}")
            object.__setattr__(self, "dir", os.path.abspath(os.path.expanduser(self.dir)))

    @classmethod
    def of(cls, value: Cache | str) -> Cache:
        """Return ``value``, made a ``Cache`` if it is a word."""
        return value if isinstance(value, cls) else cls(where=value)  # type: ignore[arg-type]

    def __repr__(self) -> str:
        return _short_repr(self)


@dataclass(frozen=True)
class BadSamples:
    """The policy for samples whose file cannot be read or decoded.

    Errors that a transform raises are errors of the script: they are raised under every policy.

    Args:
        policy: ``"raise"`` stops with an error that names path and index; ``"replace"``
            uses another sample of the same class instead; ``"skip"`` leaves the sample out.
            ``FastLoader`` with threads then fills the batch with the samples that follow;
            from worker processes, and in a stock ``DataLoader``, the batch is shorter.
        log: file to which one JSON line is appended for each bad sample.  ``None`` only logs a
            warning through ``logging``.
        max_errors: raise an error once more than this many different samples are bad in one
            process.  ``None`` sets no limit.

    The policy's name is accepted wherever a ``BadSamples`` is.

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
        """Return ``value``, made a ``BadSamples`` if it is a policy's name."""
        return value if isinstance(value, cls) else cls(policy=value)  # type: ignore[arg-type]

    def __repr__(self) -> str:
        return _short_repr(self)


@dataclass(frozen=True)
class Shuffle:
    """A way to shuffle an epoch, as an alternative to ``shuffle=True``.

    Args:
        window: number of groups that are mixed at a time; None takes as many as are 32 MB decoded.
            For volumes, patches come from this many places in turn; None takes as many places as
            decode little more than is used.
        unit: ``"sample"`` shuffles samples, every order equally likely, as ``shuffle=True`` does.
            ``"group"`` shuffles the groups of samples that are cheap to read together, such as
            the chunks of an HDF5 file, and then the samples of each ``window`` groups.
            Each group is read once, while it is in memory.  **Changes the order's statistics**:
            two samples of a batch are from the same group with probability up to 1 / ``window``,
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
        mode: ``"train"`` gives each rank the same number of batches, of equal sizes; to achieve
            this, fewer samples than there are ranks may come twice.  ``"eval"`` gives every sample
            exactly once; ranks get the same number of batches, whose sizes differ by at most one.

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
        """Return this process's shard: from ``torch.distributed`` if it is initialised, else from the
        launcher's ``RANK`` and ``WORLD_SIZE``; without either, the whole epoch.

        Raises:
            OptionError: only one of the two variables is set, or one is not a number.
        """
        distributed = sys.modules.get("torch.distributed")  # already imported if it is initialised
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            return cls(distributed.get_rank(), distributed.get_world_size(), mode)
        rank, world = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
        if rank is None and world is None:
            return cls(0, 1, mode)
        try:
            return cls(int(rank or ""), int(world or ""), mode)
        except ValueError:
            raise OptionError(
                f"Shard.auto() found RANK={rank!r} and WORLD_SIZE={world!r} in the environment, which one "
                "launcher cannot have set: unset them, or pass Shard(rank, world)"
            ) from None


@dataclass(frozen=True)
class Stage:
    """A folder on a local disk to which remote files are copied just before they are needed.

    Threads, worker processes and ranks of a machine share it, and each file is downloaded once.  If all
    files fit, none is downloaded again; otherwise the file that is needed last is evicted for the one
    needed next.  If the stage is lost, full or read-only, files are read from their origin.

    Args:
        dir: an existing or new folder; the stage creates a folder ``fastpipe-stage`` of mode 0700 in it.
        max_bytes: maximum size in bytes.  ``"auto"``: the bytes already staged plus nine tenths of the
            disk's free space, when the stage is opened.
        mode: ``"prefetch"`` copies what the next batches need; ``"mirror"`` copies everything, as fast as
            the store delivers it.
        connections: maximum number of simultaneous requests.  ``"auto"`` adapts to the measured latency
            and bandwidth, up to 128.
        read_ahead: maximum number of bytes that are fetched before they are used.  ``"auto"`` is an eighth
            of the free memory, at most 256 MiB.

    The folder's path is accepted wherever a ``Stage`` is.

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
        """Return ``value``, made a ``Stage`` if it is a folder's path."""
        return value if isinstance(value, cls) else cls(value)  # type: ignore[arg-type]

    def __repr__(self) -> str:
        return _short_repr(self)


@dataclass(frozen=True)
class Subset:
    """Some classes of a dataset, drawn by a seed.

    The classes are sorted by name, then shuffled with NumPy's ``RandomState(seed).permutation``, whose values
    are the same in every version; the first ``num`` classes are taken, and sorted again.  The same seed
    draws the same classes of the same dataset; a larger ``num`` adds classes to those of a smaller one.

    Args:
        num: number of classes, from 1 to 2**32 - 1.
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
        """Return the ``num`` classes drawn from ``names``, sorted.

        Raises:
            OptionError: there are fewer than ``num`` names.
        """
        if self.num > len(names):
            raise OptionError(f"Subset(num={self.num}) asks for more classes than the {len(names)} there are")
        found = sorted(names)
        order = np.random.RandomState(self.seed).permutation(len(found))
        return sorted(found[number] for number in order[: self.num].tolist())


def _as_integer(option: Any, name: str, kind: str = "an integer") -> int:
    """Convert a field to an ``int``, and return it."""
    value = getattr(option, name)
    try:
        number = operator.index(value)
    except TypeError:
        raise OptionError(f"{type(option).__name__}({name}=…) must be {kind}, got {value!r}") from None
    object.__setattr__(option, name, number)
    return number


def _check_count(option: Any, name: str, unit: str, remedy: str = "") -> None:
    """Raise an ``OptionError`` unless a field is ``"auto"`` or a positive number."""
    if getattr(option, name) == "auto":
        return
    if (value := _as_integer(option, name, f"'auto' or a number of {unit}")) <= 0:
        raise OptionError(f"{type(option).__name__}({name}=…) must be positive, got {value}{remedy}")


def _check_choice(what: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise OptionError(f"{what} must be one of {', '.join(map(repr, choices))}; got {value!r}")


def _short_repr(option: Any) -> str:
    """Return the repr of a dataclass with only those fields that differ from their defaults."""
    changed = [
        f"{field.name}={getattr(option, field.name)!r}"
        for field in fields(option)
        if getattr(option, field.name) != field.default or field.name in ("policy", "where")
    ]
    return f"{type(option).__name__}({', '.join(changed)})"
