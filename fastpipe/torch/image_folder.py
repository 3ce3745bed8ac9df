"""``FastImageFolder``: torchvision's ``ImageFolder``, but it makes whole batches."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch
import torchvision
from torch.utils.data import Dataset
from torchvision.datasets import DatasetFolder, ImageFolder, VisionDataset, folder
from torchvision.datasets.folder import IMG_EXTENSIONS, default_loader, pil_loader

from fastpipe.core import class_folders
from fastpipe.core.archives import ArchiveFolder
from fastpipe.core.progress import SlowWork
from fastpipe.core.sample_tables import RowTable, SampleTable, TargetTable
from fastpipe.core.tables import DataFrame, is_table, read_table, remote_shards, why_not_local
from fastpipe.core.text import printable_lines
from fastpipe.core.types import Key
from fastpipe.errors import OptionError
from fastpipe.images.cache import check_form
from fastpipe.images.plan import Plan, compile_plan, plan_state
from fastpipe.options import BadSamples, Cache, Decode, Stage, Subset
from fastpipe.torch.batches import LAYOUTS, Batch, BatchRequest
from fastpipe.torch.runtime import Options, Runtime
from fastpipe.torch.source import BatchedDataset
from fastpipe.torch.threads import is_thread_safe, stock_note

if TYPE_CHECKING:
    from typing_extensions import Self

    from fastpipe.stores.fetching import ObjectReader
    from fastpipe.torch.staging import RemoteImages


_OF_STORES = ("stage", "storage_options")
_OF_FOLDERS = ("is_valid_file", "allow_empty", "refresh", *_OF_STORES)


def _listed_samples(
    samples: Any, image: Any, target: Any, root: str | os.PathLike[str], classes: Sequence[str],
    options: Mapping[str, Any],
) -> tuple[list[str], Any, RemoteImages | None]:  # fmt: skip
    shards = remote_shards(samples)
    for name in _OF_FOLDERS:
        if name in options and not (shards and name in _OF_STORES):
            raise OptionError(
                f"{name}= applies to images found in a folder; from_samples() receives the list of images. "
                f"Got {name}={options[name]!r}. Leave it out, or use FastImageFolder(root, …)"
            )
    if isinstance(classes, str) or not all(isinstance(name, str) for name in classes):
        raise OptionError(f"classes must be names of classes, got {classes!r}")
    if image is not None and target is not None:
        keeps = Cache.of(options.get("cache", "auto")).where != "off"
        if not shards:
            return list(classes), read_table(samples, image, target, root, classes, keeps), None
        from fastpipe.torch.staging import RemoteShards  # this also imports the stores

        stage = options.get("stage")
        stage = None if stage is None else Stage.of(stage)
        remote = RemoteShards(shards, options.get("storage_options"), stage)
        found = read_table(remote.paths, image, target, root, classes, keeps, remote.read_samples)
        remote.hold(found)
        return list(classes), found, remote
    if image is not None or target is not None or is_table(samples):
        raise OptionError(
            f"a table needs the names of two columns, got image={image!r}, target={target!r}, such as "
            'image="file", target="label". For images without a target, name the column of the paths twice'
        )
    items = [_item(f"from_samples(samples=…)[{n}]", sample, root) for n, sample in enumerate(samples)]
    if not items:
        raise OptionError("from_samples(samples=…) has no samples: is the table empty, or filtered away?")
    is_flat = all(type(target) is int for _, target in items)
    return list(classes), SampleTable(items) if is_flat else items, None


def _item(name: str, sample: Any, root: str | os.PathLike[str]) -> tuple[str, Any]:
    if isinstance(sample, Mapping):
        raise OptionError(
            f'{name} is a dict: name its keys, such as image="file", target="label", got {sample!r}'
        )
    try:
        path, target = sample
        text = os.fsdecode(path)
    except (TypeError, ValueError):
        raise OptionError(
            f"{name} must be (path, target), such as ('cat/1.jpg', 0), got {sample!r}"
        ) from None
    if problem := why_not_local(text, root):
        raise OptionError(f"{name} {problem}")
    return os.path.join(root, text), target


def _targets_of(samples: Any) -> Sequence[Any]:
    if isinstance(samples, RowTable):
        return samples.targets()
    if isinstance(samples, SampleTable) and samples.is_flat:
        return TargetTable(samples.targets_array())
    targets = [sample[1] for sample in samples]
    return TargetTable(targets) if isinstance(samples, SampleTable) else targets


def _why_not_by_pillow(loader: Any) -> str:
    if folder.pil_loader is not pil_loader:
        return "torchvision.datasets.folder.pil_loader has been replaced"
    if loader is default_loader and torchvision.get_image_backend() != "PIL":
        return f"torchvision's image backend is {torchvision.get_image_backend()!r}"
    return ""


_USUAL, _HERE = BatchRequest(), BatchRequest(threaded=False)


if TYPE_CHECKING:  # torchvision ships no types, and mypy infers nothing from a class with an unknown base

    class _Folder(Dataset[tuple[Any, Any]]):
        make_dataset: Any

        def __init__(self, *_: Any, **__: Any) -> None: ...
        def __getattr__(self, name: str) -> Any: ...
else:
    _Folder = ImageFolder


class FastImageFolder(BatchedDataset, _Folder):
    """A ``torchvision.datasets.ImageFolder`` that is several times as fast, with the same samples.

    Threads decode only the part of an image that the transform's crop needs, and resample and normalise this
    part in one pass.  They do not hold the GIL.  ``print(dataset.plan)`` shows which step runs where.  The
    dataset works in any ``DataLoader``.  In a :class:`fastpipe.FastLoader`, the next batches are made while
    the current batch is used.

    Args:
        root, transform, target_transform, loader, is_valid_file, allow_empty: as in
            ``ImageFolder``.  A custom ``loader`` is called for each image.  ``root`` may also be a zip or tar
            file with class folders, or a folder in it, such as ``"data.tar/train"``, which is not unpacked.
        seed: with a seed, order and augmentation in a ``FastLoader`` depend only on the seed and the epoch.
            In any other loader, random numbers come from torch's global generator.
        stage: a folder on a local disk, a :class:`fastpipe.Stage` or its path.  Remote images are copied
            there before they are needed.  Without a stage, they are prefetched into memory.
        storage_options: for a ``root`` that is a URL, such as ``"s3://bucket/train"``: credentials and
            settings for its fsspec file system (``key``, ``secret``, ``endpoint_url`` …).
        refresh: list the objects below a remote or staged ``root`` again, instead of using an earlier
            listing.
        cache: where to keep decoded images, a :class:`fastpipe.Cache` or its ``where``.  With
            ``"off"`` nothing is written anywhere, not even the list of a large folder's files.
        classes: the class folders to use.  It is a sequence of names, whose order gives the class indices, a
            :class:`fastpipe.Subset`, or a function that receives the sorted names of all class folders and
            returns the names to use.  Default: all class folders, sorted.
        bad_samples: how to handle files that cannot be read, a :class:`fastpipe.BadSamples`
            or its policy's name.
        decode: how to decode images, a :class:`fastpipe.Decode`.
        threads: number of decoding threads.  ``"auto"`` is cores ÷ (ranks on this machine × workers), minus
            one if this is 8 or more and the loader has at most one worker.
        thread_safe: promise that transforms unknown to fastpipe may be called from several
            threads at once.  They then run in the decoding threads.
        memory_format: ``torch.channels_last`` gives image tensors the strides of this format at no cost.
            Their shape is (C, H, W) with both formats.

    ``dataset[i]`` is ``(image, target)``, exactly as in ``ImageFolder``.  Without a transform, the image is a
    PIL image.  Otherwise the image is the transform's result.

    Raises:
        FileNotFoundError: there is no class folder, or a class has no images.
        OptionError: an option's value cannot work.
    """

    samples: Sequence[tuple[str, Any]]
    imgs: Sequence[tuple[str, Any]]
    targets: Sequence[Any]
    classes: list[str]
    class_to_idx: dict[str, int]
    # During ``from_samples``: classes, samples, and the store that contains these.
    _listed: tuple[list[str], Any, RemoteImages | None] | None = None

    def __init__(
        self,
        root: str | Path,
        transform: Callable[..., Any] | None = None,
        target_transform: Callable[..., Any] | None = None,
        loader: Callable[[str], Any] = default_loader,
        is_valid_file: Callable[[str], bool] | None = None,
        allow_empty: bool = False,
        *,
        seed: int | None = None,
        cache: Cache | Literal["auto", "ram", "disk", "off"] = "auto",
        stage: Stage | str | os.PathLike[str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        refresh: bool = False,
        classes: Sequence[str] | Callable[[list[str]], Sequence[str]] | Subset | None = None,
        bad_samples: BadSamples | Literal["raise", "replace", "skip"] = "raise",
        decode: Decode = Decode(),  # noqa: B008 - immutable
        threads: int | Literal["auto"] = "auto",
        thread_safe: bool = False,
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> None:
        if threads != "auto" and (not isinstance(threads, int) or threads < 1):
            raise OptionError(f"threads must be 'auto' or a number from 1, got {threads!r}")
        self.seed = seed if seed is None else operator.index(seed)
        self.cache = Cache.of(cache)
        self.bad_samples = BadSamples.of(bad_samples)
        self.decode = decode
        self.threads = threads
        self.thread_safe = thread_safe
        self.memory_format = memory_format
        self._only_classes = list(classes) if isinstance(classes, list) else classes
        self.stage = None if stage is None else Stage.of(stage)
        self._remote: RemoteImages | None = None
        if self._listed is not None:
            self._remote = self._listed[2]
        elif self.stage is not None or storage_options is not None or refresh or ":" in os.fspath(root):
            from fastpipe.torch.staging import remote_images  # this also imports the stores

            self._remote = remote_images(root, storage_options, self.stage, refresh)
        self._archive = None if self._listed else ArchiveFolder.at(root, self.cache.where != "off")
        if self._archive is not None and self._remote is not None:
            raise OptionError(
                f"stage= copies single files, and {os.fspath(root)!r} is in an archive: copy the archive to "
                "the local disk, and leave stage= out"
            )
        # ImageFolder's constructor would build lists of Python objects, so call VisionDataset's.
        VisionDataset.__init__(self, root, transform=transform, target_transform=target_transform)
        self.classes, self.class_to_idx = self.find_classes(self.root)
        if callable(classes):  # a function may not be picklable
            self._only_classes = list(self.classes)
        self.extensions = IMG_EXTENSIONS if is_valid_file is None else None
        self.imgs = self.samples = samples = self._find_samples(is_valid_file, allow_empty)
        self.targets = _targets_of(samples)
        self.loader = loader
        self._check_loader()
        if self._loads_fast():
            self._prepare_cache()
        self._runtime: Runtime | None = None
        self._compiled: tuple[Any, Plan] | None = None

    @classmethod
    def from_samples(
        cls,
        samples: Iterable[tuple[str | os.PathLike[str], Any]] | Iterable[Mapping[str, Any]]
        | DataFrame | str | os.PathLike[str],
        transform: Callable[..., Any] | None = None,
        target_transform: Callable[..., Any] | None = None,
        *,
        image: str | int | None = None,
        target: str | int | Sequence[str | int] | Mapping[Any, str | int] | None = None,
        root: str | os.PathLike[str] = "",
        classes: Sequence[str] = (),
        **options: Any,
    ) -> Self:  # fmt: skip
        """Make a dataset from a table or list of images.  It can replace your own ``Dataset`` that opens
        images.

        Args:
            samples: a table: a DataFrame of pandas or Polars, the path of a ``.csv``, ``.json`` or ``.jsonl``
                file, or an iterable of dicts.  Tar files with WebDataset's names are a table, too: their
                paths, or a pattern such as ``"train-{000..146}.tar"``, also URLs of S3; columns are the
                extensions, such as ``image="jpg", target="cls"``.  So are an LMDB of encoded images,
                ``"data.lmdb"``, whose columns are keys, such as ``image="image-*", target="label-*"``, and
                tables with images in a column: a ``Dataset`` of Hugging Face's package ``datasets``, or an
                ``.arrow`` file.  Or, without ``image`` and ``target``, an iterable of pairs (path, target),
                as in ``ImageFolder.samples``, with targets of any kind that can be collated.
            transform, target_transform: as in ``ImageFolder``.
            image: the table's column of paths.
            target: the table's column of targets.  With a list of columns, a sample's target is the tuple of
                their values, as with lists of target types in torchvision: ``target_transform=torch.tensor``
                makes a float32 vector of numbers.  With a dict, such as ``{"age": "age", "name": "file"}``,
                the target is a dict with the same keys and the values of these columns.
            root: the base folder of relative paths.  Default: the working directory.
            classes: names of classes, in the order of their indices.  Names in the column ``target`` become
                indices, and integers must be indices.  Without ``classes``, texts remain texts.
            options: options of the class, except options about folders; of these, tar files in S3 take
                ``stage`` and ``storage_options``.  ``bad_samples="replace"`` uses a
                sample with an equal target, or any sample if targets are neither integers nor strings.

        Targets of a table are Python objects: ``default_collate`` gives int64 for integers and float64 for
        floats.  A column has one type; integers beside floats become floats.  In a CSV file, a column becomes
        integers or floats if all its cells are decimal numbers without leading zeros, such as ``7``, ``-0.5``
        or ``1e-3``; otherwise its cells remain texts.  A column with both kinds of cells is an error.

        Raises:
            OptionError: there are no samples; a sample is not a pair (local file, target); an option is about
                folders; a table has no such column; or a value of a used column does not fit or is missing
                (``None``, NaN, an empty cell of a CSV file).  The message names the row.  To train with NaN,
                pass pairs: ``zip(table["file"], table["age"])``.

        >>> from PIL import Image
        >>> folder = getfixture("tmp_path")
        >>> Image.new("RGB", (32, 32)).save(folder / "x.png")
        >>> _ = (folder / "train.csv").write_text("file,label,age\\nx.png,cat,4.5\\n")
        >>> table = folder / "train.csv"
        >>> both = {"image": "file", "root": folder}
        >>> FastImageFolder.from_samples(table, target="label", classes=["dog", "cat"], **both)[0][1]
        1
        >>> FastImageFolder.from_samples(table, target=["age", "label"], **both)[0][1]
        (4.5, 'cat')
        >>> FastImageFolder.from_samples([("x.png", 0.5)], root=folder)[0][1]
        0.5
        """
        dataset = cls.__new__(cls)
        dataset._listed = _listed_samples(samples, image, target, root, classes, options)
        cls.__init__(dataset, os.fspath(root), transform, target_transform, **options)
        dataset._listed = None  # ``samples`` contains them now
        return dataset

    def find_classes(self, directory: str | Path) -> tuple[list[str], dict[str, int]]:
        """Return the class names and their indices, as in ``ImageFolder``, but only for the classes that the
        constructor's argument ``classes`` selects."""
        if self._listed is not None:
            classes = self._listed[0]
            return classes, {name: index for index, name in enumerate(classes)}
        if self._remote is not None and os.fspath(directory) == os.fspath(self.root):
            return self._remote.find_classes(self._only_classes, self._index_cache())
        if self._archive is not None and os.fspath(directory) == os.fspath(self.root):
            return self._archive.find_classes(self._only_classes)
        return class_folders.find_classes(directory, self._only_classes)

    @property
    def memory_format(self) -> torch.memory_format:
        """The memory format (order of strides) of image tensors, as given."""
        found: torch.memory_format = getattr(torch, self._memory_format)
        return found

    @memory_format.setter
    def memory_format(self, value: torch.memory_format) -> None:
        if value not in LAYOUTS:
            raise OptionError(
                f"memory_format must be torch.contiguous_format or torch.channels_last, got {value}"
            )
        # Store the name: torch's objects cannot be pickled with the protocol that torch.save uses.
        self._memory_format = str(value).removeprefix("torch.")

    @property
    def plan(self) -> Plan:
        """The steps that make a sample, and where each step runs.  The plan changes if ``transform``
        changes."""
        dtype = torch.get_default_dtype()
        state = plan_state(self.transform), self.thread_safe, self.memory_format, dtype
        if self._compiled is None or self._compiled[0] != state:
            plan = compile_plan(
                self.transform, layout=LAYOUTS[self.memory_format], decode_note=self._running().decoders,
                stock_note=partial(stock_note, self.thread_safe),
            )  # fmt: skip
            self._compiled = (state, plan)
        return self._compiled[1]

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        """Return sample ``index`` as ``(image, target)``."""
        if not self._loads_fast():
            stock: tuple[Any, Any] = super().__getitem__(index)
            return stock
        batch = self._start_batch([index], request=_HERE)
        image, target = self._only(batch)[0]  # the batch has one sample, so the image has its own memory
        return image, target

    def _handed_out(self, samples: Sequence[Any]) -> list[Any]:
        return self._running().hand_out(samples)

    def __repr__(self) -> str:
        return printable_lines(super().__repr__())

    def extra_repr(self) -> str:
        """Return lines of text for ``repr``: the options whose values are not the defaults."""
        shown = {
            "Decoding": (self.decode, Decode()), "Staged": (self.stage, None),
            "Decoded images": (self.cache, Cache()), "Bad samples": (self.bad_samples, BadSamples()),
            "Seed": (self.seed, None),
        }  # fmt: skip
        return "\n".join(f"{name}: {value!r}" for name, (value, usual) in shown.items() if value != usual)

    @property
    def downloaded(self) -> tuple[int, int]:
        """Number of objects and number of bytes that this process has fetched from the store."""
        return (0, 0) if self._remote is None else self._remote.downloaded

    def stage_all(self, on_progress: Callable[[int, int], None] | None = None) -> list[tuple[str, Exception]]:
        """Copy all images to the stage folder now, as fast as their store delivers them.

        Args:
            on_progress: function that is called a few times a second with the number of objects and the
                number of bytes copied so far.

        Returns:
            A pair (path, error) for each image that could not be copied.

        Raises:
            OptionError: the dataset has no ``stage``.
            StageError: the stage has no room for all images.
            StoreError: the store does not answer.
        """
        return self._stage_reader().stage_all(on_progress or (lambda objects, nbytes: None))

    def verify_stage(self, on_progress: Callable[[int], None] | None = None) -> list[str]:
        """Compare the staged images with the checksums in the store's listing.  Download again the images
        that differ, and return their paths.  ``on_progress`` is called with the number of images read so far.
        Errors are those of ``stage_all``."""
        return self._stage_reader().verify(on_progress or (lambda objects: None))

    def _stage_reader(self) -> ObjectReader:
        if self._remote is None or self.stage is None:
            raise OptionError("there is no stage to copy to: give stage= a folder on a local disk")
        return self._remote.reader()

    def close(self) -> None:
        """End the dataset's threads in this process, and close the stage and the store.  Deleting the dataset
        does the same.  If the dataset is used again, it starts threads and opens the stage and the store
        again."""
        runtime, self._runtime = self._runtime, None
        if self._remote is not None:
            self._remote.close()
        if runtime is not None:
            runtime.close()

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_compiled": None}

    # ---- how a batch is made -----------------------------------------------------------------------

    def _start_batch(
        self, indices: Sequence[int] | npt.NDArray[np.int64], key: Key | None = None,
        request: BatchRequest = _USUAL,
    ) -> Batch:  # fmt: skip
        return Batch(self, indices, key, request)

    def _answers_for_batches(self) -> bool:
        return type(self).__getitem__ is FastImageFolder.__getitem__ and self._loads_fast()

    def _loads_fast(self) -> bool:
        return self.loader is default_loader and not _why_not_by_pillow(default_loader)

    def _stock_threads(self, plan: Plan) -> bool:
        return self.thread_safe or is_thread_safe(plan.stock)

    def _rows(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        assert self._remote is not None
        return self._remote.rows(self.samples, positions)

    def _find_samples(self, is_valid_file: Callable[[str], bool] | None, allow_empty: bool) -> Any:
        """Return the samples as a table or as a list.  Errors are those of ``ImageFolder.make_dataset``."""
        if self._listed is not None:
            return self._listed[1]
        options: dict[str, Any] = {
            "extensions": self.extensions, "is_valid_file": is_valid_file, "allow_empty": allow_empty
        }  # fmt: skip
        # A subclass may find its files in another way.
        if type(self).make_dataset is not ImageFolder.make_dataset:
            return self.make_dataset(self.root, class_to_idx=self.class_to_idx, **options)
        if self._archive is not None:
            return self._archive.scan(self.class_to_idx, **options)
        with SlowWork(f"Scanning {os.fspath(self.root)}") as progress:

            def on_progress(folders: int, files: int) -> None:
                progress(f"{files:,} files in {folders:,} folders so far")

            options |= {"cache": self._index_cache(), "on_progress": on_progress}
            if self._remote is not None:
                return self._remote.scan(self.class_to_idx, **options)
            return class_folders.scan_folder(self.root, self.class_to_idx, **options)

    def _check_loader(self) -> None:
        if self.loader is default_loader:
            return
        if self._remote is not None or self._archive is not None:
            raise OptionError(
                f"a custom loader, here {self.loader!r}, opens files, and {self.root!r} has "
                "none. Leave it out, or copy the images to a folder of your own"
            )
        keeps = self.cache.where in ("ram", "disk")
        if self.bad_samples != BadSamples() or self.decode != Decode() or keeps:
            raise OptionError(
                "cache=, bad_samples= and decode= say how fastpipe reads files; with a custom loader, "
                f"here {self.loader!r}, they would have no effect. Leave one or the other out."
            )

    def _prepare_cache(self) -> None:
        """Open the cache in this process, so that forked workers share it."""
        if self.cache.where != "off":
            from fastpipe.core.caches import open_cache_store

            check_form(self.cache, self.decode)
            open_cache_store(self.cache)

    def _index_cache(self) -> class_folders.IndexCache | None:
        return None if self.cache.where == "off" else class_folders.default_index_cache()

    def _running(self) -> Runtime:
        runtime = self._runtime
        options = Options(self.decode, self.bad_samples, self.threads, self.cache)
        if runtime is None or not runtime.fits(options):
            samples = self.samples  # the dataset is freed without a collection of garbage
            runtime = self._runtime = Runtime(
                options, len(samples), lambda number: samples[number][0], self._remote
            )
        return runtime


class AdaptedImageFolder(FastImageFolder):
    """Makes the batches of a torchvision ``ImageFolder``.  ``original`` is this ``ImageFolder``, the user's
    dataset."""

    def __init__(self, original: ImageFolder, cache: Cache) -> None:
        # No base constructor is called, so the folder is not scanned again, and no attributes are copied.
        self.original, self.cache = original, cache
        self.bad_samples, self.decode = BadSamples(), Decode()
        self.threads, self.thread_safe = "auto", False
        self.memory_format = torch.contiguous_format
        self.seed = self.stage = self._remote = self._runtime = self._compiled = None
        self._prepare_cache()

    samples = property(lambda self: self.original.samples)
    targets = property(lambda self: self.original.targets)
    transform = property(lambda self: self.original.transform)
    target_transform = property(lambda self: self.original.target_transform)
    root = property(lambda self: self.original.root)


def why_not_adapted(dataset: ImageFolder) -> str:
    kind = type(dataset)
    method = DatasetFolder.__getitem__
    if method.__module__ != DatasetFolder.__module__:
        return "ImageFolder.__getitem__ has been replaced"
    for name in ("__getitem__", "__getattribute__"):
        if getattr(kind, name) is not getattr(DatasetFolder, name):
            return f"{kind.__name__} has its own {name}"
    for name in ("__getitems__", "__getattr__"):
        if hasattr(kind, name):
            return f"{kind.__name__} has its own {name}"
    if dataset.loader not in (default_loader, pil_loader):
        return f"it loads images with {getattr(dataset.loader, '__name__', dataset.loader)!r}"
    return _why_not_by_pillow(dataset.loader)
