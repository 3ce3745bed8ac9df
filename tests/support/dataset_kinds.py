"""Every kind of dataset, and the stock dataset in whose place it is used: a table for tests of all of them."""

from __future__ import annotations

import io
import itertools
import json
import tarfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import h5py
import lmdb
import nibabel
import numpy as np
import pandas as pd
import torch
import zarr
from PIL import Image
from torch.utils.data import Dataset
from torchvision import transforms
from torchvision.datasets import ImageFolder
from volume_files import write_dicom

from fastpipe import FastHDF5Dataset, FastImageFolder, FastPatchDataset
from fastpipe.bench.synthetic import photo_tree
from fastpipe.sampling import Grid, Uniform

STEADY = transforms.Compose([transforms.Resize(40), transforms.CenterCrop(32), transforms.ToTensor()])
RANDOM = transforms.Compose(
    [transforms.RandomResizedCrop(24), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
)


class H5pyRows(Dataset[Any]):
    """What scripts do: open the file with h5py, and take a row."""

    def __init__(self, paths: Any, keys: Any, sample_dims: int = 1) -> None:
        self.paths = [paths] if isinstance(paths, (str, Path)) else list(paths)
        self.keys, self.leads = keys, []
        first = (
            keys
            if isinstance(keys, str)
            else next(iter(keys.values() if isinstance(keys, Mapping) else keys))
        )
        for path in self.paths:
            with h5py.File(path, "r") as file:
                self.leads.append(file[first].shape[:sample_dims])
        self.ends = np.cumsum([int(np.prod(lead)) for lead in self.leads])

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, index: int) -> Any:
        index = int(index) + len(self) * (index < 0)
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = int(np.searchsorted(self.ends, index, side="right"))
        local = index - (int(self.ends[number - 1]) if number else 0)
        place = tuple(map(int, np.unravel_index(local, self.leads[number])))
        with h5py.File(self.paths[number], "r") as file:
            if isinstance(self.keys, str):
                return file[self.keys][place]
            if isinstance(self.keys, Mapping):
                return {name: file[key][place] for name, key in self.keys.items()}
            return tuple(file[key][place] for key in self.keys)


class Groups(Dataset[Any]):
    """A script's own dataset: opens the file, and takes the group of a sample."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with h5py.File(path, "r") as file:
            self.names = sorted(file)

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> Any:
        with h5py.File(self.path, "r") as file:
            group = file[self.names[index]]
            return group["x"][()], group.attrs["n"]


class OwnImages(Dataset[Any]):
    """A script's own dataset of paths and targets."""

    def __init__(self, table: Sequence[tuple[Any, Any]], transform: Any = None) -> None:
        self.table, self.transform = table, transform

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> Any:
        path, target = self.table[index]
        image = Image.open(path).convert("RGB")
        return image if self.transform is None else self.transform(image), target


class LmdbImages(Dataset[Any]):
    """A script's own dataset over an LMDB of images, with a text and a class for each."""

    def __init__(self, path: Path, transform: Any) -> None:
        self.path, self.transform = path, transform

    def __len__(self) -> int:
        return int(self._values(b"num-samples")[0])

    def __getitem__(self, index: int) -> Any:
        image, text, target = self._values(*_keys(range(len(self))[index]))
        return self.transform(Image.open(io.BytesIO(image)).convert("RGB")), (text.decode(), int(target))

    def _values(self, *keys: bytes) -> list[bytes]:
        with lmdb.open(str(self.path), readonly=True, lock=False, readahead=False) as env, env.begin() as txn:
            return [txn.get(key) for key in keys]


class Slices(Dataset[Any]):
    """Slices of an array in memory, on a grid."""

    def __init__(self, *arrays: Any) -> None:
        self.arrays = arrays

    def __len__(self) -> int:
        return len(STARTS)

    def __getitem__(self, index: int) -> Any:
        box = tuple(slice(at, at + side) for at, side in zip(STARTS[index], PATCH, strict=True))
        found = tuple(array[box].copy() for array in self.arrays)
        return found if len(found) > 1 else found[0]


def noise(*values: Any) -> Any:
    """A transform that draws."""
    if isinstance(values[0], dict):
        return {**values[0], "x": noise(values[0]["x"])}
    moved = torch.from_numpy(np.array(values[0], np.float32)) + torch.rand(())
    return moved if len(values) == 1 else (moved, *values[1:])


@dataclass(frozen=True)
class Kind:
    """A kind of dataset: its data in a folder, the dataset over them, and the stock one.

    Attributes:
        drawn: options with which samples are drawn anew in each epoch.
        spoil: damages some of the data, and returns the indices of these samples.
    """

    write: Callable[[Path], object]
    fast: Callable[..., Any]
    stock: Callable[[Path], Any]
    drawn: dict[str, Any]
    spoil: Callable[[Path], list[int]] | None = None


# ---- images -------------------------------------------------------------------------------------

_ENDS = ["png", "bmp", "webp", "jpg", "tif"]


def _photos(folder: Path) -> None:
    photo_tree(folder / "tree", classes=3, per_class=5, sizes=(52, 64))


def _other_formats(folder: Path) -> None:
    _photos(folder)
    for number, path in enumerate(sorted(folder.rglob("*.jpg"))):
        with Image.open(path) as image:
            other = image.convert("L") if number == 6 else image.copy()
        path.unlink()
        other.save(path.with_suffix(f".{_ENDS[number % 5]}"))


def _zipped(folder: Path) -> None:
    _photos(folder)
    paths = sorted((folder / "tree").rglob("*.jpg"))
    with zipfile.ZipFile(folder / "tree.zip", "w") as archive:
        for number, path in enumerate(paths):
            kind = zipfile.ZIP_DEFLATED if number % 2 else zipfile.ZIP_STORED
            archive.write(path, path.relative_to(folder), kind)


def _shards(folder: Path) -> None:
    _photos(folder)
    samples = ImageFolder(folder / "tree").samples
    for number in range(3):
        with tarfile.open(folder / f"shard-{number}.tar", "w") as archive:
            for place in range(number * 5, number * 5 + 5):
                path, target = samples[place]
                _add(archive, f"{place:03}.JPG", Path(path).read_bytes())
                _add(archive, f"{place:03}.cls", str(target).encode())
                _add(archive, f"{place:03}.json", json.dumps({"name": f"é{place}"}).encode())


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


def _of_shards(folder: Path, root: Any = None, **options: Any) -> FastImageFolder:
    return FastImageFolder.from_samples(
        f"{root or folder}/shard-{{0..2}}.tar",
        **{"transform": STEADY, "image": "jpg", "target": ["cls", "json"], **options},
    )


def _as_in_shards(folder: Path) -> OwnImages:
    samples = ImageFolder(folder / "tree").samples
    table = [(path, (target, {"name": f"é{n}"})) for n, (path, target) in enumerate(samples)]
    return OwnImages(table, STEADY)


def _remote_shards(folder: Path) -> None:
    _shards(folder)
    _put(folder)


def _no_members(folder: Path) -> list[int]:
    for path in folder.glob("*.tar"):
        with tarfile.open(path) as archive:
            offsets = [member.offset_data for member in archive if member.name in ("002.JPG", "009.JPG")]
        with open(path, "r+b") as file:
            for offset in offsets:
                file.seek(offset)
                file.write(b"no image")
    return [2, 9]


def _keys(number: int) -> list[bytes]:
    return [f"image-{number:03}".encode(), f"label-{number:03}".encode(), f"{number:03}.cls".encode()]


def _lmdb(folder: Path) -> None:
    _photos(folder)
    samples = ImageFolder(folder / "tree").samples
    with lmdb.open(str(folder / "x.lmdb"), map_size=1 << 24) as env, env.begin(write=True) as txn:
        txn.put(b"num-samples", str(len(samples)).encode())
        for number, (path, target) in enumerate(samples):
            for key, value in zip(
                _keys(number), (Path(path).read_bytes(), f"é{number}", target), strict=True
            ):
                txn.put(key, value if isinstance(value, bytes) else str(value).encode())


def _of_lmdb(folder: Path, **options: Any) -> FastImageFolder:
    return FastImageFolder.from_samples(
        folder / "x.lmdb",
        **{"transform": STEADY, "image": "image-*", "target": ["label-*", "*.cls"], **options},
    )


def _no_values(folder: Path) -> list[int]:
    samples, path = ImageFolder(folder / "tree").samples, folder / "x.lmdb" / "data.mdb"
    data = path.read_bytes()
    with open(path, "r+b") as file:
        for number in (2, 9):
            file.seek(data.index(Path(samples[number][0]).read_bytes()))
            file.write(b"no image")
    return [2, 9]


def _upload(folder: Path) -> None:
    _photos(folder)
    _put(folder / "tree")


def _put(folder: Path) -> None:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            fsspec.filesystem("memory").pipe(f"{folder}/{path.relative_to(folder)}", path.read_bytes())


def _images(folder: Path, root: Any = None, **options: Any) -> FastImageFolder:
    return FastImageFolder(root or folder / "tree", **{"transform": STEADY, **options})


def _stock_images(folder: Path) -> ImageFolder:
    return ImageFolder(folder / "tree", STEADY)


def _table(folder: Path) -> list[tuple[str, Any]]:
    samples = ImageFolder(folder / "tree").samples
    return [(path, {"label": target, "name": f"{number}"}) for number, (path, target) in enumerate(samples)]


def _frame(folder: Path) -> pd.DataFrame:
    files = [path for path, _ in _table(folder)]
    return pd.DataFrame(
        {"file": files, "age": np.arange(len(files)) / 7, "name": [f"n{n}" for n in range(len(files))]}
    )


def _no_images(folder: Path) -> list[int]:
    paths = sorted(path for path in (folder / "tree").rglob("*") if path.is_file())
    for index in (2, 9):
        paths[index].write_bytes(b"no image")
    return [2, 9]


# ---- rows ---------------------------------------------------------------------------------------


def _rows(folder: Path) -> None:
    values = np.random.default_rng(0).integers(0, 9, (19, 4, 6)).astype("f4")
    values[:, 0, 0] = np.arange(19)
    with h5py.File(folder / "x.h5", "w") as file:
        file.create_dataset("x", data=values, chunks=(4, 4, 5), compression="gzip", shuffle=True)
        file["plain"], file["n"] = values, np.arange(19)
        file["text"] = [f"text {number}" for number in range(19)]


def _dataset_of(keys: Any) -> dict[str, Any]:
    return {
        "write": _rows, "fast": lambda folder, **options: FastHDF5Dataset(folder / "x.h5", keys, **options),
        "stock": lambda folder: H5pyRows(folder / "x.h5", keys),
    }  # fmt: skip


def _groups(folder: Path) -> None:
    values = np.random.default_rng(0).integers(0, 9, (19, 4, 6)).astype("f4")
    with h5py.File(folder / "x.h5", "w") as file:
        for number, value in enumerate(values):
            options = {"chunks": (4, 5), "compression": "gzip"} if number % 3 else {}
            value[0] = number
            file.create_group(f"{number:02}").create_dataset("x", data=value, **options)
            file[f"{number:02}"].attrs["n"] = number


def _bad_members(folder: Path) -> list[int]:
    for name in ("04", "10"):
        _overwrite(folder / "x.h5", f"{name}/x", (0, 5))
    return [4, 10]


def _bad_chunk(folder: Path) -> list[int]:
    _overwrite(folder / "x.h5", "x", (4, 0, 0))
    return [4, 5, 6, 7]


def _overwrite(path: Path, name: str, place: tuple[int, ...]) -> None:
    with h5py.File(path) as file:
        info = file[name].id.get_chunk_info_by_coord(place)
    with open(path, "r+b") as target:
        target.seek(info.byte_offset)
        target.write(bytes(min(info.size, 20)))


# ---- patches ------------------------------------------------------------------------------------

SHAPE, CHUNK, PATCH, STRIDE = (9, 14, 16), (4, 4, 8), (3, 4, 5), (3, 5, 6)
STARTS = list(itertools.product((0, 3, 6), (0, 5, 10), (0, 6, 11)))  # of which the last moved inwards
VOLUME = np.arange(int(np.prod(SHAPE)), dtype="i2").reshape(SHAPE)
LABELS = (VOLUME % 5).astype("u1")


def _zarr(folder: Path) -> None:
    zarr.create_array(folder / "x.zarr", data=VOLUME, chunks=CHUNK)


def _remote_zarr(folder: Path) -> None:
    _zarr(folder)
    _put(folder / "x.zarr")


def _volumes_of_hdf5(folder: Path) -> None:
    with h5py.File(folder / "x.h5", "w") as file:
        file.create_dataset("x", data=VOLUME, chunks=CHUNK, compression="gzip")
        file.create_dataset("labels", data=LABELS, chunks=CHUNK, compression="lzf")


def _nifti(folder: Path) -> None:
    nibabel.save(nibabel.Nifti1Image(VOLUME, np.eye(4)), folder / "x.nii.gz")


def _patches(volume: str, labels: str | None = None) -> Callable[..., FastPatchDataset]:
    def make(folder: Path, url: str = "", **options: Any) -> FastPatchDataset:
        given = {"sampling": Grid(STRIDE), "labels": labels and f"{folder}/{labels}", **options}
        return FastPatchDataset(f"{url}{folder}/{volume}", PATCH, **given)

    return make


def _in_second_chunk() -> list[int]:
    """The patches that touch the chunk that is the second in each dimension."""
    return [
        index for index, start in enumerate(STARTS)
        if all(at < 2 * long and long < at + side for at, side, long in zip(start, PATCH, CHUNK, strict=True))
    ]  # fmt: skip


def _bad_object(folder: Path) -> list[int]:
    (folder / "x.zarr/c/1/1/1").write_bytes(b"damaged")
    return _in_second_chunk()


def _bad_labels(folder: Path) -> list[int]:
    _overwrite(folder / "x.h5", "labels", CHUNK)
    return _in_second_chunk()


def _with(make: Callable[..., Any], **fixed: Any) -> Callable[..., Any]:
    return lambda folder, **options: make(folder, **(fixed | options))


def _staged(make: Callable[..., Any]) -> Callable[..., Any]:
    return lambda folder, **options: make(folder, stage=folder / "stage", **options)


_DRAWN = {"sampling": Uniform(27), "transform": noise}
KINDS: dict[str, Kind] = {
    "images": Kind(_photos, _images, _stock_images, {"transform": RANDOM}, _no_images),
    "images, kept": Kind(_photos, _with(_images, cache="ram"), _stock_images, {"transform": RANDOM}, _no_images),
    "images of other formats": Kind(_other_formats, _images, _stock_images, {"transform": RANDOM}, _no_images),
    "images of a table": Kind(
        _photos,
        lambda folder, **options: FastImageFolder.from_samples(_table(folder), **{"transform": STEADY, **options}),
        lambda folder: OwnImages(_table(folder), STEADY), {"transform": RANDOM}, _no_images,
    ),
    "images of a data frame": Kind(
        _photos,
        lambda folder, **options: FastImageFolder.from_samples(
            _frame(folder), **{"transform": STEADY, "image": "file", "target": ["age", "name"], **options}
        ),
        lambda folder: OwnImages([(row.file, (row.age, row.name)) for row in _frame(folder).itertuples()], STEADY),
        {"transform": RANDOM}, _no_images,
    ),
    "images in a zip file": Kind(
        _zipped, lambda folder, **options: _images(folder, folder / "tree.zip" / "tree", **options), _stock_images,
        {"transform": RANDOM},
    ),
    "images in shards": Kind(_shards, _of_shards, _as_in_shards, {"transform": RANDOM}, _no_members),
    "images in shards, kept": Kind(
        _shards, _with(_of_shards, cache="ram"), _as_in_shards, {"transform": RANDOM}, _no_members
    ),
    "images in remote shards": Kind(
        _remote_shards, lambda folder, **options: _of_shards(folder, f"memory://{folder}", **options), _as_in_shards,
        {"transform": RANDOM},
    ),
    "images in an LMDB": Kind(
        _lmdb, _of_lmdb, lambda folder: LmdbImages(folder / "x.lmdb", STEADY), {"transform": RANDOM}, _no_values
    ),
    "images, staged": Kind(_photos, _staged(_images), _stock_images, {"transform": RANDOM}),
    "images, remote": Kind(
        _upload, lambda folder, **options: _images(folder, f"memory://{folder}/tree", **options), _stock_images,
        {"transform": RANDOM},
    ),
    "rows": Kind(**_dataset_of(["x", "n"]), drawn={"transform": noise}, spoil=_bad_chunk),
    "rows of names": Kind(**_dataset_of({"x": "x", 5: "n", "t": "text"}), drawn={"transform": noise}),
    "rows, contiguous": Kind(**_dataset_of("plain"), drawn={"transform": noise}),
    "datasets of their own": Kind(
        _groups, lambda folder, **options: FastHDF5Dataset(folder / "x.h5", ["*/x", "*@n"], **options),
        lambda folder: Groups(folder / "x.h5"), {"transform": noise}, _bad_members,
    ),
    "rows, staged": Kind(
        _rows, _staged(lambda folder, **options: FastHDF5Dataset(folder / "x.h5", "x", **options)),
        lambda folder: H5pyRows(folder / "x.h5", "x"), {"transform": noise},
    ),
    "patches of Zarr": Kind(_zarr, _patches("x.zarr"), lambda _: Slices(VOLUME), _DRAWN, _bad_object),
    "patches of HDF5": Kind(
        _volumes_of_hdf5, _patches("x.h5/x", "x.h5/labels"), lambda _: Slices(VOLUME, LABELS), _DRAWN, _bad_labels
    ),
    "patches of NIfTI": Kind(_nifti, _patches("x.nii.gz"), lambda _: Slices(VOLUME), _DRAWN),
    "patches of DICOM": Kind(
        lambda folder: write_dicom(folder / "ct", VOLUME), _patches("ct"), lambda _: Slices(VOLUME), _DRAWN
    ),
    "patches, remote": Kind(
        _remote_zarr, _with(_patches("x.zarr"), url="memory://"), lambda _: Slices(VOLUME), _DRAWN
    ),
}  # fmt: skip
