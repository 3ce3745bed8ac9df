"""Options of datasets and loaders: immutable objects that check their arguments on construction."""

from __future__ import annotations

import operator
import os
import sys
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any, Literal

import numpy as np

from fastpipe.errors import OptionError

__all__ = ["BadSamples", "Cache", "Decode", "Rescale", "Shard", "Shuffle", "Stage", "Subset", "ZScore"]


@dataclass(frozen=True)
class Decode:
    """Settings for decoding images.

    On the CPU, the pixels equal Pillow's, except with ``scaled`` or ``short_side``.  Images that are decoded
    on a GPU differ slightly from Pillow's.

    Args:
        backend: the decoder.  ``"auto"`` decodes with libjpeg-turbo if the pixels then equal Pillow's.
            ``"dali"`` decodes the images of a batch in one run of an NVIDIA DALI pipeline.  ``"pillow"``
            decodes all images with Pillow.  ``"simplejpeg"`` is an old name of ``"auto"``.  Every decoder
            on the CPU falls back to Pillow for images that the decoder cannot decode exactly as Pillow does.
            ``"nvimgcodec"`` and ``"dali"`` decode and resample on the GPU if the loader is a
            ``FastLoader(device="cuda")`` without worker processes.
            If ``fastpipe.tf.image_dataset`` returns TensorFlow's pixels, the pixels do not depend on
            ``backend``.  ``"dali"`` then decodes with DALI.  The other values then make no difference.
        exif: apply the EXIF orientation.  The default is False, because torchvision's ``ImageFolder``
            ignores the orientation.
        scaled: decode a JPEG at 1/2, 1/4 or 1/8 of its size if the region that the transform reads is at
            least 2, 4 or 8 times as large as the transform's output.  Large photographs then take less
            time.  **Changes pixels.**
        short_side: number of pixels.  If the shorter side of an image has more pixels, the image is shrunk
            before any transform, as by ``torchvision.transforms.Resize(short_side)``.  **Changes pixels.**
            With a cache, the cached images then take less memory and less work in each epoch.
        max_pixels: an image with more pixels than this number is refused before it is decoded.  ``None``
            applies Pillow's policy (``PIL.Image.MAX_IMAGE_PIXELS``).
        gpu_share: fraction, from 0 to 1, of each batch's images that the GPU decodes.  These images are
            spread evenly over the batch, and the CPU decodes the remaining images at the same time.
            ``"auto"`` tries several fractions on the training's own batches, for about a second, then uses
            the fastest fraction and logs it.  ``FastLoader.plan`` shows the choice.  With ``"auto"``, the
            speed of the machine decides which images the GPU decodes, so some pixels may differ between
            runs.  With a number, the GPU decodes the same images in each run.
            ``None`` means all images for ``"nvimgcodec"`` and ``"dali"``, and no image for
            ``backend="auto"``.  If ``gpu_share`` is given, ``backend="auto"`` uses nvImageCodec on the GPU.
            ``gpu_share`` has no effect if nothing is decoded on a GPU.

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
        for name in ("short_side", "max_pixels"):
            _check_least(self, name, 1, "a number of pixels from 1, or None")
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
    """A cache for decoded images, HDF5 chunks or parts of volumes, which are then decoded only once.

    The cache holds decoded data before the random part of a transform, so the results do not change.  A file
    that has changed is decoded again.  Images and HDF5 chunks are never evicted.  If not all images fit, the
    images in the cache are read from it in every epoch, and the other images are decoded in every epoch.

    Images can be kept as pixels, which take the least time, and about 6 to 10 times the bytes of a JPEG.  Or
    as coefficients, the result of the slowest step, entropy decoding: they take about 1.15 times the bytes of
    the JPEG.  Or as an index of the JPEG, which takes a fiftieth of its bytes.  The pixels are the same, bit
    for bit.

    Args:
        where: ``"ram"`` keeps data in memory.  All threads, worker processes and other processes of
            this user on this machine share one cache if their ``max_bytes`` are equal.  The last process
            that uses the cache frees its memory.  ``"disk"`` keeps data in files, for this and later runs.
            ``"auto"`` is like ``"ram"``, but keeps a sample only from its second use on, and only if all
            samples of the dataset fit.  ``"off"`` keeps nothing.
        max_bytes: maximum size in bytes.  ``"auto"`` is a quarter of the memory or disk space that is free
            when the cache is created.  In a container, only the memory of the container's cgroup counts.
        dir: with ``"disk"``, an existing or new folder.  The cache creates a folder ``fastpipe-decoded``
            of mode 0700 in ``dir``.  By default, this folder is in the user's cache folder.
        form: what is kept of an image.  ``"pixels"`` keeps all of its pixels, after
            ``Decode(short_side=…)``.  ``"coefficients"`` keeps the coefficients of JPEGs: grey ones and those
            of YCbCr with the usual chroma subsampling (4:4:4, 4:2:2, 4:2:0), of 8 bits.  It keeps nothing of
            other images.  ``"index"`` keeps where in a JPEG decoding can begin, so that only a crop is
            decoded; files are still read.  ``"auto"`` chooses by the sizes of some images the first of these
            forms in which all images fit; with ``where="auto"``, only pixels or coefficients.  Only image
            folders have a form: of HDF5 files, chunks are kept, of volumes, parts, and in
            ``fastpipe.tf.image_dataset``, finished samples.

    For volumes, decoded parts are kept in memory from their first use on, up to ``max_bytes``.  If more room
    is needed, the least useful parts are evicted.  ``"disk"`` is not available for volumes.

    Every argument that accepts a ``Cache`` also accepts one of the four values of ``where``.

    >>> Cache("ram", max_bytes=8 << 30)
    Cache(where='ram', max_bytes=8589934592)
    >>> Cache("disk", dir="/nvme", form="coefficients")
    Cache(where='disk', dir='/nvme', form='coefficients')
    """

    where: Literal["auto", "ram", "disk", "off"] = "auto"
    max_bytes: int | Literal["auto"] = "auto"
    dir: str | os.PathLike[str] | None = None
    form: Literal["auto", "pixels", "coefficients", "index"] = "auto"

    def __post_init__(self) -> None:
        _check_choice("Cache(where=…)", self.where, ("auto", "ram", "disk", "off"))
        _check_choice("Cache(form=…)", self.form, ("auto", "pixels", "coefficients", "index"))
        _check_count(self, "max_bytes", "bytes", "; where='off' keeps nothing")
        if self.dir is not None:
            if self.where != "disk":
                raise OptionError(f"Cache(dir=…) applies to where='disk' only; got where={self.where!r}")
            object.__setattr__(self, "dir", os.path.abspath(os.path.expanduser(self.dir)))

    @classmethod
    def of(cls, value: Cache | str) -> Cache:
        """Return ``value`` itself, or ``Cache(where=value)`` if ``value`` is a string."""
        return value if isinstance(value, cls) else cls(where=value)  # type: ignore[arg-type]

    @classmethod
    def without_form(cls, value: Cache | str, kept: str) -> Cache:
        """Return the same as ``of``, for a dataset that keeps only ``kept``.

        Raises:
            OptionError: the cache names a form.
        """
        cache = cls.of(value)
        if cache.form != "auto":
            raise OptionError(
                f"Cache(form={cache.form!r}) is for FastImageFolder: this dataset keeps {kept}. Leave it out."
            )
        return cache

    def __repr__(self) -> str:
        return _short_repr(self)


@dataclass(frozen=True)
class BadSamples:
    """The policy for samples whose file cannot be read or decoded.

    Errors that a transform raises are errors of the script and are raised under every policy.

    Args:
        policy: ``"raise"`` stops with an error that names the path and the index.  ``"replace"``
            uses another sample of the same class instead.  ``"skip"`` leaves the sample out.
            With ``"skip"``, ``FastLoader`` with threads fills the batch with the next samples.
            If worker processes or torch's ``DataLoader`` make the batch, the batch is shorter.
        log: file to which one JSON line is appended for each bad sample.  ``None`` writes no file.
            For each bad sample, a warning is also logged by the module ``logging``.
        max_errors: raise an error when more than this number of different samples are bad in one
            process.  ``None`` sets no limit.

    Every argument that accepts a ``BadSamples`` also accepts the name of a policy.

    >>> BadSamples("replace", max_errors=100)
    BadSamples(policy='replace', max_errors=100)
    """

    policy: Literal["raise", "replace", "skip"] = "raise"
    log: str | os.PathLike[str] | None = None
    max_errors: int | None = None

    def __post_init__(self) -> None:
        _check_choice("BadSamples(policy=…)", self.policy, ("raise", "replace", "skip"))
        _check_least(self, "max_errors", 0, "an integer from 0, or None")

    @classmethod
    def of(cls, value: BadSamples | str) -> BadSamples:
        """Return ``value`` itself, or ``BadSamples(policy=value)`` if ``value`` is the name of a policy."""
        return value if isinstance(value, cls) else cls(policy=value)  # type: ignore[arg-type]

    def __repr__(self) -> str:
        return _short_repr(self)


@dataclass(frozen=True)
class Shuffle:
    """A way to shuffle an epoch, as an alternative to ``shuffle=True``.

    Args:
        window: with ``unit="group"``, the number of groups whose samples are shuffled together.  None
            takes as many groups as fit in 32 MB when decoded.  For volumes, ``window`` is the number of
            regions from which patches come in turn.  None then takes the largest number of regions with
            which only little data is decoded without being used.
        unit: ``"sample"`` shuffles samples as ``shuffle=True`` does: every order is equally likely.
            ``"group"`` works on groups of samples that are cheap to read together, such as the samples in
            a chunk of an HDF5 file.  The groups are shuffled first.  Then the samples of every ``window``
            groups are shuffled together.  Each group is read only once in an epoch.  **Changes the order's
            statistics**: two samples of a batch are from the same group with probability up to
            1 / ``window``, instead of 1 / (number of groups).

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
    """The part of each epoch that one process (rank) of a distributed training gets.

    Args:
        rank: the number of this process, from 0.
        world: number of processes that share an epoch.
        mode: with ``"train"``, all ranks get the same number of batches, and batches of equal sizes.  For
            this, up to ``world - 1`` samples are repeated.  With ``"eval"``, every sample is used exactly
            once.  All ranks then get the same number of batches, and their sizes differ by at most one.

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
        """Return the shard of this process.

        The rank comes from ``torch.distributed`` if that module is initialised, else from the launcher's
        environment variables ``RANK`` and ``WORLD_SIZE``.  If neither is set, the shard is the whole epoch.

        Raises:
            OptionError: only one of the two variables is set, or a variable is not a number.
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

    All threads, worker processes and ranks of a machine share the files in this folder (the stage).  If all
    files fit, each file is downloaded only once.  If not all files fit, the file whose next use is furthest
    in the future is removed to make room for the next file.  If the stage is lost, full or read-only, files
    are read from the remote store.

    Args:
        dir: an existing or new folder.  The stage creates a folder ``fastpipe-stage`` of mode 0700 in it.
        max_bytes: maximum size in bytes.  ``"auto"`` is the number of bytes already staged plus nine tenths
            of the disk's free space when the stage is opened.
        mode: ``"prefetch"`` copies the files that the next batches need.  ``"mirror"`` copies all files, as
            fast as the store delivers them.
        connections: maximum number of simultaneous requests to the store.  ``"auto"`` adapts this number to
            the measured latency and bandwidth, up to 128.
        read_ahead: maximum number of bytes that have been fetched but not used.  ``"auto"`` is an eighth of
            the free memory, at most 256 MiB.

    Every argument that accepts a ``Stage`` also accepts the path of the folder.

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
        """Return ``value`` itself, or ``Stage(value)`` if ``value`` is the path of a folder."""
        return value if isinstance(value, cls) else cls(value)  # type: ignore[arg-type]

    def __repr__(self) -> str:
        return _short_repr(self)


@dataclass(frozen=True)
class Subset:
    """Some classes of a dataset, selected at random by a seed.

    The classes are sorted by name, then shuffled with ``numpy.random.RandomState(seed).permutation``, which
    gives the same order in every version of NumPy.  The first ``num`` classes are taken and sorted again.
    The same seed selects the same classes of a dataset.  With the same seed, a larger ``num`` selects all
    classes that a smaller ``num`` selects, and further classes.

    Args:
        num: number of classes, from 1 to 2**32 - 1.
        seed: seed of the shuffle, from 0 to 2**32 - 1.

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
        """Return the selected classes of ``names``, sorted by name.

        Raises:
            OptionError: ``names`` has fewer than ``num`` entries.
        """
        if self.num > len(names):
            raise OptionError(f"Subset(num={self.num}) asks for more classes than the {len(names)} there are")
        found = sorted(names)
        order = np.random.RandomState(self.seed).permutation(len(found))
        return sorted(found[number] for number in order[: self.num].tolist())


@dataclass(frozen=True)
class ZScore:
    """A normalisation of volumes: subtract the volume's mean, then divide by its standard deviation.

    This is MONAI's ``NormalizeIntensity(nonzero=…, channel_wise=…)``, nnU-Net's ``ZScoreNormalization``, and
    TorchIO's ``ZNormalization``.  The mean and the standard deviation are computed once from the whole
    volume, in float64.  Patches are float32, and are computed in float32.  If the standard deviation is 0,
    the volume is divided by 1.

    Args:
        nonzero: only voxels that are not 0 are counted and changed.
        channel_wise: each channel has its own mean and standard deviation.  The channels are the volume's
            leading dimensions.

    >>> ZScore(nonzero=True)
    ZScore(nonzero=True)
    """

    nonzero: bool = False
    channel_wise: bool = False

    def __repr__(self) -> str:
        return _short_repr(self)


@dataclass(frozen=True)
class Rescale:
    """A normalisation of volumes: map two percentiles of a volume linearly to the ends of a range.

    This is MONAI's ``ScaleIntensity`` and ``ScaleIntensityRangePercentiles``, and TorchIO's
    ``RescaleIntensity``.  The percentiles are computed once from the whole volume, exactly as
    ``numpy.percentile`` computes them for float64.  Patches are float32, and are computed in float32.  A
    volume whose two percentiles are equal is only shifted.

    Args:
        to: the two ends of the range.
        percentiles: the percentiles, from 0 to 100, that become the ends of the range.  0 is the volume's
            minimum, and 100 is its maximum.
        clip: values beyond the percentiles become the ends of the range.
        channel_wise: each channel has its own percentiles.  The channels are the volume's leading dimensions.

    Raises:
        OptionError: an argument has a value that cannot work.

    >>> Rescale((-1, 1), percentiles=(0.5, 99.5))
    Rescale(to=(-1.0, 1.0), percentiles=(0.5, 99.5))
    """

    to: tuple[float, float] = (0.0, 1.0)
    percentiles: tuple[float, float] = (0.0, 100.0)
    clip: bool = True
    channel_wise: bool = False

    def __post_init__(self) -> None:
        limits = {"to": (-float(np.finfo(np.float32).max), float(np.finfo(np.float32).max)),
                  "percentiles": (0.0, 100.0)}  # fmt: skip
        for name, (least, most) in limits.items():
            try:
                low, high = map(float, getattr(self, name))
            except (TypeError, ValueError):
                low, high = 0.0, 0.0
            if not least <= low < high <= most:
                within = " from 0 to 100" if name == "percentiles" else ""
                raise OptionError(
                    f"Rescale({name}=…) must be two increasing numbers{within}, got {getattr(self, name)!r}"
                )
            object.__setattr__(self, name, (low, high))

    def __repr__(self) -> str:
        return _short_repr(self)


def _as_integer(option: Any, name: str, kind: str = "an integer") -> int:
    """Convert the field ``name`` of an option to an ``int``, store it in the option, and return it."""
    value = getattr(option, name)
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise OptionError(f"{type(option).__name__}({name}=…) must be {kind}, got {value!r}") from None
    object.__setattr__(option, name, number)
    return number


def _check_least(option: Any, name: str, least: int, kind: str) -> None:
    """Raise an ``OptionError`` if the field ``name`` is neither None nor an integer from ``least``."""
    value = getattr(option, name)
    if value is not None and _as_integer(option, name, kind) < least:
        raise OptionError(f"{type(option).__name__}({name}=…) must be {kind}, got {value!r}")


def _check_count(option: Any, name: str, unit: str, remedy: str = "") -> None:
    """Raise an ``OptionError`` if the field ``name`` is neither ``"auto"`` nor a positive integer."""
    if getattr(option, name) == "auto":
        return
    if (value := _as_integer(option, name, f"'auto' or a number of {unit}")) <= 0:
        raise OptionError(f"{type(option).__name__}({name}=…) must be positive, got {value}{remedy}")


def _check_choice(what: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise OptionError(f"{what} must be one of {', '.join(map(repr, choices))}; got {value!r}")


def _short_repr(option: Any) -> str:
    """Return the repr of a dataclass without the fields that have their default value.

    The fields ``policy`` and ``where`` are always included.
    """
    changed = [
        f"{field.name}={getattr(option, field.name)!r}"
        for field in fields(option)
        if getattr(option, field.name) != field.default or field.name in ("policy", "where")
    ]
    return f"{type(option).__name__}({', '.join(changed)})"
