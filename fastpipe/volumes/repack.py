"""``fastpipe repack VOLUME OUT.zarr``: copy a volume to a Zarr array with other chunks.

tensorstore writes the copy to a private folder next to OUT.  fastpipe's own reader reads each part back and
compares the part with the source.  The folder gets the name OUT when the copy is complete.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from rich.console import Console

from fastpipe.console import Pace, Progress, print_line
from fastpipe.core.files import (
    folder_below,
    is_hdf5,
    is_url,
    parents_made,
    read_file,
    remove_tree,
    rename_anew,
    sync_folder,
    write_output,
    write_whole,
)
from fastpipe.core.machine import available_cpus
from fastpipe.core.text import counted, in_bytes
from fastpipe.errors import HDF5Error, OptionError, VolumeError
from fastpipe.hdf5.library import h5py
from fastpipe.hdf5.opening import library_errors, opened, raw_name
from fastpipe.volumes.opening import UnsupportedFormatError, open_volume
from fastpipe.volumes.tensorstore import FAILED, SPEC, opened_by_tensorstore
from fastpipe.volumes.volume import (
    Box,
    DamagedUnitError,
    GroupedVolume,
    Int64Array,
    NativeVolume,
    UnitGrid,
    UnitReader,
    Volume,
    aligned,
    box_text,
    box_within,
)
from fastpipe.volumes.zarr import METADATA, NUMBERS, ZarrVolume, even_parts, is_zarr, json_object

Array = npt.NDArray[Any]

_LEVELS = {"blosc-zstd": (0, 9), "zstd": (1, 22), "none": (0, 0)}
_LARGEST_CHUNK = 1 << 30  # Blosc's limit is 2 GiB
_BLOCK_NBYTES = 1 << 17  # the least bytes of a Blosc block, which a reader decompresses on its own
_AUTO_NBYTES = 256 << 20
TOGETHER_NBYTES = 8 << 20  # bytes that a thread decodes by one call, if units are not larger
_WORTH_NBYTES = 16 << 20  # bytes of a brick from which on a larger brick is not preferred for its size
_MOST_FILES = 1 << 19  # the most files in a folder whose bytes are counted
_GROUP = {"zarr_format": 3, "node_type": "group", "attributes": {}}
_METADATA = ("zarr.json", ".zarray", ".zattrs", "attributes.json")
_OWN_KEYS = {"dimensions", "blockSize", "dataType", "compression", "compressionType"}  # keys that N5 defines
# Programs would mistake a folder with one of these suffixes for another format.
_OF_OTHERS = {
    ".b2nd", ".gz", ".h5", ".hdf", ".hdf5", ".he5", ".mrc", ".n5", ".nii", ".npy", ".npz", ".nrrd", ".raw",
    ".tif", ".tiff",
}  # fmt: skip


def repack_volume(args: argparse.Namespace, console: Console, progress: Progress) -> int:
    """Write and verify the copy; ``args`` has the arguments of ``fastpipe.tools.repack``."""
    begun = time.monotonic()
    source, out = str(args.input), Path(args.output)
    volume = open_source(source)
    layout = _layout(args, volume)
    _check_paths(source, str(args.output))
    if os.path.lexists(out):
        raise _exists_already(out)
    groups = _groups_to_make(out)
    bricks = planned_bricks(volume, layout, args.threads or available_cpus(), args.memory)
    notes = Notes.of(source, volume)
    if notes.others:
        progress.done(f"not copied, as JSON cannot hold them: attributes {', '.join(notes.others)}")
    before = _state(source, volume)
    with parents_made(out), _new_folder(out.parent) as folder:
        _copy(volume, Path(folder, "array"), layout, bricks, notes, Pace(progress, "copying", volume.nbytes))
        if _state(source, volume) != before:
            raise VolumeError(f"{source} has changed meanwhile; repack it when it is complete")
        if hasattr(os, "sync"):
            progress.now("waiting for the disk")
            os.sync()
        try:
            rename_anew(os.path.join(folder, "array"), out)
        except FileExistsError:
            raise _exists_already(out) from None
    for group in groups:
        write_output(group / METADATA[0], json.dumps(_GROUP))
    sync_folder(out.parent)
    progress.stop()
    seconds, decoded = time.monotonic() - begun, volume.nbytes
    before, after = stored_nbytes(source), stored_nbytes(str(out))
    sizes = ""
    if after is not None:
        sizes = f"{in_bytes(decoded if before is None else before)} → {in_bytes(after)}"
        sizes += f" ({after / max(decoded, 1):.2f}× of what is decoded)"
    chunks = UnitGrid(layout.shape, layout.chunk).count
    empty = chunks - sum(len(files) for _, _, files in os.walk(out / "c"))
    without = f", {empty:,} of them without a file, as they hold nothing but the fill value," if empty else ""
    print_line(
        console,
        f"{out}: {sizes}; {counted(chunks, 'chunk')}{without} in {seconds:.1f} s "
        f"({in_bytes(decoded / max(seconds, 1e-9))}/s), every one read back and equal",
    )
    return 0


def _layout(args: argparse.Namespace, volume: Volume) -> ZarrLayout:
    given = {
        "--chunk-rows": args.chunk_rows is not None, "--shuffle and --no-shuffle": args.shuffle is not None,
        "--dataset": bool(args.dataset), "--sample-dims": args.sample_dims != 1, "--force": args.force,
    }  # fmt: skip
    for name, is_given in given.items():
        if is_given:
            raise OptionError(f"{name} is for copies in HDF5, not in Zarr")
    if args.chunks is None:
        raise OptionError(
            "--chunks is missing: give the shape of a chunk, such as --chunks 64,128,128; "
            "`fastpipe inspect` with --patch says which is good"
        )
    try:
        codec = Codec.of(args.codec, args.level)
        return ZarrLayout.of(volume.shape, volume.dtype, args.chunks, codec, volume.fill)
    except OptionError as error:
        raise OptionError(f"{volume.name}: {error}") from None


def _check_paths(source: str, named: str) -> None:
    out = Path(named)
    if is_url(named):
        raise OptionError(f"{named} is not on this machine; name a folder here, and upload that")
    if not out.name:
        raise OptionError(f"{out} is no name for a folder")
    if out.suffix.lower() in _OF_OTHERS:
        raise OptionError(
            f"{out}: volumes are written as Zarr, in a folder, and {out.suffix} is the ending of something "
            f"else; name it {out.with_suffix('.zarr')}"
        )
    if os.path.lexists(out) and os.path.realpath(out) == os.path.realpath(source):
        raise OptionError(f"{out} is the input itself; name another folder")
    if os.path.isdir(source) and Path(os.path.realpath(out)).is_relative_to(os.path.realpath(source)):
        raise OptionError(f"{out} is within the input, which it would change; name a folder elsewhere")


def _groups_to_make(out: Path) -> list[Path]:
    """Return the folders above ``out``, from the first one named ``….zarr``, that are no Zarr groups yet."""
    above = [*reversed(out.parents)]
    first = next((number for number, folder in enumerate(above) if folder.suffix == ".zarr"), len(above))
    missing = []
    for folder in above[first:]:
        if not is_zarr(str(folder)):
            missing.append(folder)
            continue
        file = folder / METADATA[0]
        data = json_object(str(file), read_file(str(file))) if file.exists() else {}
        if data.get("node_type") != "group":
            what = "a Zarr array" if (folder / METADATA[1]).exists() or data else "a Zarr group of version 2"
            raise OptionError(f"{folder} is {what}, which cannot hold {out}: name a folder elsewhere")
        if "consolidated_metadata" in data:
            raise OptionError(
                f"{folder} has consolidated metadata, which would not list {out}: name a folder elsewhere"
            )
    return missing


def _exists_already(out: Path) -> OptionError:
    return OptionError(f"{out} exists; name another folder, or remove it first")


@contextlib.contextmanager
def _new_folder(parent: Path) -> Iterator[str]:
    """Create a private folder, and remove the folder at the end.

    The yielded path leads to the folder even if another process moves or replaces it.
    """
    made = tempfile.mkdtemp(prefix="fastpipe-repack-", dir=parent)
    try:
        with folder_below(parent, os.path.basename(made)) as folder:
            yield folder
    finally:
        remove_tree(made)


def _copy(
    volume: Volume, array: Path, layout: ZarrLayout, bricks: Bricks, notes: Notes, pace: Pace
) -> None:  # fmt: skip
    target, reader = create_array(array, layout, bricks.threads, notes), volume.open()
    copy: Volume | None = None
    boxes = list(bricks.boxes(layout.shape))
    pool = ThreadPoolExecutor(bricks.threads, "fastpipe-repack")
    try:
        for number, box in enumerate(boxes):
            brick = read_box(volume, reader, box, layout.dtype, pool)
            parts = bricks.parts(box)
            finish_all([pool.submit(write_box, target, part, brick[box_within(part, box)]) for part in parts])
            copy = copy or open_volume(array)
            _check_copy(brick, box, copy, layout, pool)
            pace.add(brick.nbytes, f"{volume.name}, part {number + 1:,} of {len(boxes):,}")
    finally:
        pool.shutdown(cancel_futures=True)


def _check_copy(brick: Array, box: Box, copy: Volume, layout: ZarrLayout, pool: Executor) -> None:
    grid = UnitGrid(layout.shape, layout.chunk)
    wrong = box
    with contextlib.suppress(DamagedUnitError):
        back = read_box(copy, copy.open(), box, layout.dtype, pool)
        parts = list(map(grid.box, grid.touched(box).tolist()))
        insides = [box_within(part, box) for part in parts]
        found = pool.map(lambda inside: _are_same(brick[inside], back[inside]), insides)
        different = [part for part, is_same in zip(parts, found, strict=True) if not is_same]
        if not different:
            return
        wrong = different[0]
    raise VolumeError(
        f"the copy's part at {box_text(wrong)} is not what the source holds when it is read back, so that "
        "there is no copy. Is the disk or the memory faulty?"
    )


def _are_same(one: Array, other: Array) -> bool:
    bits = f"u{min(one.dtype.itemsize, 8)}"  # compare bits, because a NaN is not equal to itself
    return np.array_equal(one.view(bits), other.view(bits))


class Codec(NamedTuple):
    """The compression of chunks, ``"blosc-zstd"``, ``"zstd"`` or ``"none"``, and its level."""

    name: str
    level: int

    @classmethod
    def of(cls, name: str, level: int | None) -> Codec:
        name = "blosc-zstd" if name == "keep" else name
        if name not in _LEVELS:
            raise OptionError(f"--codec for Zarr must be one of {', '.join(_LEVELS)}; got {name!r}")
        least, most = _LEVELS[name]
        if name == "none":
            if level is not None:
                raise OptionError("--level goes with a codec, not with --codec none")
            return cls(name, 0)
        level = 5 if level is None else level
        if not least <= level <= most:
            raise OptionError(f"--level of {name} is from {least} to {most}, got {level}")
        return cls(name, level)


class ZarrLayout(NamedTuple):
    shape: tuple[int, ...]  # shape of the array
    dtype: np.dtype[Any]  # dtype of the stored elements, which are little-endian
    chunk: tuple[int, ...]  # shape of a chunk
    codec: Codec
    fill: Any = 0  # the fill value; a chunk that contains only this value needs no file

    @classmethod
    def of(
        cls, shape: Sequence[int], dtype: np.dtype[Any], chunk: Sequence[int], codec: Codec, fill: bytes = b""
    ) -> ZarrLayout:
        """Return a layout for an array.

        ``chunk`` is the chunk shape along the last dimensions.  ``fill`` contains the bytes of the fill value
        in ``dtype``.  If ``fill`` is empty, the fill value is 0.
        """
        if dtype.name not in NUMBERS or dtype.names:
            raise OptionError(f"its elements are {dtype}, for which Zarr has no type")
        if not shape:
            raise OptionError("it is a single value, which has no chunks")
        if len(chunk) > len(shape):
            raise OptionError(f"--chunks has {len(chunk)} numbers, and the volume {len(shape)} dimensions")
        whole = [1] * (len(shape) - len(chunk)) + list(chunk)
        # A chunk need not be longer than the volume.
        whole = [min(side, max(size, 1)) for side, size in zip(whole, shape, strict=True)]
        if math.prod(whole) * dtype.itemsize > _LARGEST_CHUNK:
            raise OptionError(f"--chunks {','.join(map(str, whole))} makes chunks of more than 1 GiB")
        element = np.frombuffer(fill or bytes(dtype.itemsize), dtype)[0]
        return cls(tuple(shape), dtype.newbyteorder("<"), tuple(whole), codec, element)

    @property
    def chunk_nbytes(self) -> int:
        return math.prod(self.chunk) * self.dtype.itemsize

    @property
    def block(self) -> int:
        """The size of a Blosc block in bytes: the smallest slab of a chunk that is worth a separate read."""
        axis = next((dim for dim, side in enumerate(self.chunk) if side > 1), 0)
        side = self.chunk[axis]
        row = self.chunk_nbytes // side
        return row * next((slab for slab in even_parts(side) if slab * row >= _BLOCK_NBYTES), side)

    def codecs(self) -> list[dict[str, Any]]:
        itemsize, level = self.dtype.itemsize, self.codec.level
        found: list[dict[str, Any]] = [{"name": "bytes"}]
        if itemsize > 1:
            found[0]["configuration"] = {"endian": "little"}
        if self.codec.name == "zstd":
            found.append({"name": "zstd", "configuration": {"level": level, "checksum": True}})
        elif self.codec.name == "blosc-zstd":
            shuffle = "shuffle" if itemsize > 1 else "noshuffle"
            settings = {"cname": "zstd", "clevel": level, "shuffle": shuffle}
            blocks = {"typesize": itemsize, "blocksize": self.block}
            found.append({"name": "blosc", "configuration": settings | blocks})
        return found


class Notes(NamedTuple):
    attributes: dict[str, Any]  # the attributes as JSON values
    names: list[Any] | None = None  # names of the dimensions; None if they have no names
    others: tuple[str, ...] = ()  # names of attributes that JSON cannot represent

    @classmethod
    def of(cls, path: str, volume: Volume) -> Notes:
        """Return the attributes and dimension names of ``volume``; the user gave it as ``path``."""
        file = _existing(path)
        if os.path.isfile(file):
            return _notes_in_hdf5(file, volume.name.removeprefix(file)) if is_hdf5(file) else cls({})
        found = {name: _json_in(os.path.join(path, name)) for name in _METADATA}
        if own := found["zarr.json"]:
            attributes, names = dict(own.get("attributes") or {}), own.get("dimension_names")
        elif found[".zarray"]:
            attributes = found[".zattrs"]
            names = attributes.get("_ARRAY_DIMENSIONS")
            fits = isinstance(names, list) and len(names) == len(volume.shape)
            if fits and all(name is None or isinstance(name, str) for name in names or ()):
                del attributes["_ARRAY_DIMENSIONS"]
            else:
                names = None
        else:
            attributes = {key: one for key, one in found["attributes.json"].items() if key not in _OWN_KEYS}
            names = None
        return cls(attributes, names if isinstance(names, list) else None)


def _notes_in_hdf5(file: str, inside: str) -> Notes:
    found, others = {}, []
    with opened(file) as content, library_errors(file):
        attributes = content[raw_name(inside)].attrs
        for name in attributes:
            try:
                with library_errors(f"{file}, attribute {name!r}"):
                    value = attributes[name]
                plain = value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value
                plain = plain.decode() if isinstance(plain, bytes) else plain
                json.dumps(plain, allow_nan=False)
                found[name] = plain
            except (TypeError, ValueError, HDF5Error):
                others.append(name)
    return Notes(found, None, tuple(others))


def _json_in(path: str) -> dict[str, Any]:
    try:
        return json_object(path, read_file(path))
    except OSError:  # this includes VolumeError
        return {}


def create_array(array: Path, layout: ZarrLayout, threads: int, notes: Notes | None = None) -> Any:
    """Create a Zarr array of version 3 in the new folder ``array``; return tensorstore's array object."""
    metadata = {
        "shape": layout.shape,
        "data_type": layout.dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": layout.chunk}},
        "fill_value": _in_json(layout.fill),
        "codecs": layout.codecs(),
    }
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": f"{array}/"},
        "metadata": metadata,
        "context": {
            "data_copy_concurrency": {"limit": threads},
            "file_io_concurrency": {"limit": threads},
            "file_io_sync": False,  # ``repack_volume`` syncs once at the end
        },
    }
    try:
        target = opened_by_tensorstore(spec, create=True, open=False)
        if notes is not None:
            _add_notes(array / "zarr.json", notes, len(layout.shape))
    except FAILED as error:
        raise VolumeError(f"the copy cannot be made: {_reason(error, f'{array}/')}") from None
    return target


def _add_notes(file: Path, notes: Notes, dims: int) -> None:
    """Add ``notes`` to the metadata file.

    tensorstore does not do this, as it rejects NaN, infinity, large integers and duplicate names.
    """
    content = json.loads(file.read_bytes()) | {"attributes": notes.attributes}
    if notes.names is not None and len(notes.names) == dims:
        content["dimension_names"] = notes.names
    text = json.dumps(content, indent=2).encode()
    write_whole(file, lambda stream: stream.write(text))


def write_box(target: Any, box: Box, part: Array) -> None:
    """Write a box of whole chunks.  A chunk that contains only the fill value gets no file."""
    try:
        target[box].write(part).result()
    except FAILED as error:
        raise VolumeError(f"the copy cannot be written: {_reason(error, target.kvstore.path)}") from None


def _reason(error: Exception, folder: str) -> str:
    """Return the message of tensorstore's error without the name of the temporary folder."""
    text = str(error).partition(SPEC)[0].partition(" [source locations=")[0].replace(folder, "")
    return f"{text}: free some, and try again" if "No space left" in text or "ENOSPC" in text else text


def _in_json(element: Any) -> Any:
    """Return a fill value in Zarr's JSON form: a number, or text for NaN and infinity."""
    if element.dtype.kind == "c":
        return [_in_json(element.real), _in_json(element.imag)]
    plain = element.item()
    return {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}.get(str(plain), plain)


def open_source(path: str) -> Volume:
    """Open a volume that the user named.

    Uncompressed copies of compressed NIfTI files stay in the user's cache, as with ``FastPatchDataset``.
    """
    try:
        return open_volume(path, may_write=True)
    except UnsupportedFormatError as error:
        # For a file that is not HDF5 either, the error lists all supported formats.
        if not is_hdf5(path):
            raise VolumeError(f"{error}; it is not an HDF5 file either") from None
        raise


def _existing(path: str) -> str:
    """Return the existing part of a path: the file or folder, without the name of an array inside it."""
    while path and not is_url(path) and not os.path.lexists(path):
        path = os.path.dirname(path.rstrip("/"))
    return path


def _state(path: str, volume: Volume) -> Any:
    """Return a value that changes if the volume changes; if the volume's state is unknown, it is constant."""
    file = _existing(path)
    if not os.path.isfile(file):
        return volume.state()
    status = os.stat(file)  # the original file, of which the volume may be a copy
    return status.st_ino, status.st_size, status.st_mtime_ns


def stored_nbytes(path: str) -> int | None:
    """Return a volume's size on disk in bytes; None if it is unknown, or if a folder has too many files."""
    file = _existing(path)
    if os.path.isdir(path):
        files = (os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names)
        sizes = [os.stat(name).st_size for name in itertools.islice(files, _MOST_FILES + 1)]
        return sum(sizes) if len(sizes) <= _MOST_FILES else None
    if file == path and os.path.isfile(file):
        return os.stat(file).st_size
    if not os.path.isfile(file) or not is_hdf5(file):
        return None
    with opened(file) as store, library_errors(file):
        dataset = store.get(raw_name(path[len(file) :].strip("/")))
        return int(dataset.id.get_storage_size()) if isinstance(dataset, h5py.Dataset) else None


def chunk_of(volume: Volume) -> tuple[int, ...]:
    """Return the shape of a volume's chunks, or else of the parts that are decoded as a whole."""
    if isinstance(volume, (GroupedVolume, NativeVolume)):
        return chunk_of(volume.inner)
    return volume.chunks.unit if isinstance(volume, ZarrVolume) else volume.grid.unit


class Bricks(NamedTuple):
    """The division of a copy.  A *brick* is a box that is read, written and compared as a whole."""

    shape: tuple[int, ...]  # shape of a brick
    threads: int
    part: tuple[int, ...]  # shape of the parts of a brick, each of which a thread writes by one call

    def boxes(self, shape: Sequence[int]) -> Iterator[Box]:
        """Yield the bricks of an array, in C order."""
        return _cut(tuple(slice(0, size) for size in shape), self.shape)

    def parts(self, box: Box) -> Iterator[Box]:
        """Yield the parts of a brick, in C order."""
        return _cut(box, self.part)


def _cut(box: Box, shape: Sequence[int]) -> Iterator[Box]:
    sides = (
        [slice(at, min(at + side, whole.stop)) for at in range(whole.start, whole.stop, side)]
        for whole, side in zip(box, shape, strict=True)
    )
    return itertools.product(*sides)


def planned_bricks(volume: Volume, layout: ZarrLayout, threads: int, memory: int | None) -> Bricks:
    """Find the shape of bricks (see ``Bricks``) for which the fewest bytes are decoded twice.

    A brick has whole chunks of the copy.  ``memory`` is the limit for all memory in bytes.  If ``memory`` is
    None, the limit is a default value.  If the copy needs more than this value, the limit is the least memory
    that it needs.
    """
    # Each thread decodes a whole stored chunk, or compresses a part of the brick that is not larger.
    itemsize = layout.dtype.itemsize
    stored = math.prod(chunk_of(volume)) * itemsize
    most = max(stored, volume.unit_nbytes, layout.chunk_nbytes)
    least = 2 * most + 2 * layout.chunk_nbytes
    if memory is None:
        memory = max(_AUTO_NBYTES, least)
    if memory < least:
        raise OptionError(
            f"--memory of {in_bytes(memory)} is too little: chunks of {in_bytes(stored)} to ones of "
            f"{in_bytes(layout.chunk_nbytes)} take at least {in_bytes(least)}"
        )
    threads = max(1, min(threads, (memory - 2 * layout.chunk_nbytes) // (2 * most)))
    # Memory holds a brick of the volume and the brick that is read back from the copy.
    room = (memory - threads * 2 * most) // 2
    growth = 1.34 if len(layout.shape) <= 3 else 2.0  # in many dimensions there are many combinations
    options = [
        [(side * times, _decoded(size, unit, side * times)) for times in _multiples(-(-size // side), growth)]
        for size, side, unit in zip(layout.shape, layout.chunk, volume.grid.unit, strict=True)
    ]
    ranked = (
        (round(math.prod(decoded), 2), -min(nbytes, _WORTH_NBYTES), nbytes, shape)
        for shape, decoded in (zip(*sides, strict=True) for sides in itertools.product(*options))
        if (nbytes := math.prod(shape) * itemsize) <= room
    )
    *_, shape = min(ranked)
    part = list(layout.chunk)
    for dim in reversed(range(len(part))):
        part[dim] *= max(1, min(most // (math.prod(part) * itemsize), shape[dim] // part[dim]))
    return Bricks(shape, threads, tuple(part))


def _multiples(most: int, growth: float) -> list[int]:
    """Return numbers from 1 to ``most`` with increasing differences."""
    found = [1]
    while found[-1] < most:
        found.append(min(most, max(found[-1] + 1, int(found[-1] * growth))))
    return found


def _decoded(size: int, unit: int, side: int) -> float:
    """Return the decoded elements for each used element, along a dimension of bricks with side ``side``."""
    begins = np.arange(0, max(size, 1), side)
    ends = np.minimum(begins + side, max(size, 1))
    return float((((ends - 1) // unit - begins // unit + 1) * unit).sum() / max(size, 1))


def read_box(volume: Volume, reader: UnitReader, box: Box, dtype: np.dtype[Any], pool: Executor) -> Array:
    """Read a box of a volume with all threads of a pool; decode each unit once."""
    out = np.empty([side.stop - side.start for side in box], dtype)

    def read(some: Int64Array) -> None:
        parts = aligned(volume.unit_nbytes, len(some))
        reader.read(some, parts)
        for number, part in zip(some.tolist(), parts, strict=True):
            unit, side_of = part.view(volume.dtype).reshape(volume.grid.unit), volume.grid.box(number)
            both = tuple(
                slice(max(one.start, side.start), min(one.stop, side.stop))
                for one, side in zip(box, side_of, strict=True)
            )
            out[box_within(both, box)] = unit[box_within(both, side_of)]

    groups = volume.together(volume.grid.touched(box), TOGETHER_NBYTES)
    finish_all([pool.submit(read, some) for some in groups])
    return out


def finish_all(futures: Sequence[Future[Any]]) -> list[Any]:
    """Return the results of tasks in order.  All tasks have ended when this function returns or raises."""
    try:
        return [future.result() for future in futures]
    finally:
        for future in futures:
            future.cancel()
        for future in futures:
            if not future.cancelled():
                future.exception()
