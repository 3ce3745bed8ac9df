"""Any name that a file system, an HDF5 file or a bucket may hold is that name, through every door."""

from __future__ import annotations

import csv
import os
import shutil
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from PIL import Image

import fastpipe
from fastpipe import Cache, FastHDF5Dataset, FastImageFolder, FastPatchDataset, Stage
from fastpipe.cli import main
from fastpipe.sampling import Grid

NAMES = {
    "brackets": "x[1]", "question": "a?b", "star": "*", "percent": "a%20b", "format": "%s{0}", "hash": "a#b",
    "home": "~root", "variable": "${HOME}", "colons": "a::b", "scheme": "s3:", "pipe": "|;&", "at": "a@b!+=,",
    "spaces": " a  b ", "tab and line": "a\t\nb\r", "quotes": "'\"`", "backslash": "a\\nb", "option": "-rf",
    "hidden": ".x", "dots": "...", "composed": "é", "decomposed": "e\u0301", "emoji": "猫🚀", "bytes": "a\udce9\udcff",
    "direction": "\u202ex", "terminal": "\x1b[31mx\x9b\x7f", "markup": "[red]<b>$x$", "csv": "x.csv", "long": "x" * 240,
}  # fmt: skip
PIXELS = np.random.default_rng(0).integers(0, 255, (20, 24, 3), dtype=np.uint8)
VOXELS = np.arange(4 * 6 * 8, dtype=np.int16).reshape(4, 6, 8)

names = pytest.mark.parametrize("name", [pytest.param(name, id=key) for key, name in NAMES.items()])


def photo(path: str) -> str:
    """A PNG at a path, whose folders are made."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    Image.fromarray(PIXELS).save(path, "PNG")
    return path


def patches(volume: Any, shape: tuple[int, ...] = VOXELS.shape, **options: Any) -> FastPatchDataset:
    return FastPatchDataset(volume, shape, sampling=Grid(), **options)


def hdf5(path: str, name: str, values: np.ndarray[Any, Any]) -> str:
    """A file with one dataset, and a group of the same name with it again, by the library's own functions: h5py's
    take no bytes that are no UTF-8."""
    raw = os.fsencode(name)
    with h5py.File(path, "w") as file:
        chunks = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        chunks.set_chunk((2, *values.shape[1:]))
        for group, key in ((file.id, raw), (h5py.h5g.create(file.id, b"g" + raw), raw)):
            space = h5py.h5s.create_simple(values.shape)
            made = h5py.h5d.create(group, key, h5py.h5t.py_create(values.dtype), space, chunks)
            h5py.Dataset(made)[...] = values
    return path


@names
def test_folders_and_files_of_images(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = pytest.importorskip("torchvision.datasets").ImageFolder
    root = f"{tmp_path}/{name}"
    photo(f"{root}/{name}/{name}.png"), photo(f"{root}/b/{name}.png")
    theirs, ours = stock(root), FastImageFolder(root)
    assert (list(ours.samples), ours.classes) == (theirs.samples, theirs.classes)
    relative = [(os.path.relpath(path, root), target) for path, target in theirs.samples]
    monkeypatch.chdir(root)
    for dataset in (
        ours, FastImageFolder.from_samples(theirs.samples), FastImageFolder.from_samples(relative, root=root),
        FastImageFolder(root, classes=[name]), FastImageFolder.from_samples([(f"{name}/{name}.png", 0)]),
    ):  # fmt: skip
        for image, _ in dataset.__getitems__([*range(len(dataset))]):
            assert np.array_equal(image, PIXELS)
        assert repr(dataset).isprintable() or "\n" in repr(dataset)


@names
def test_folders_of_caches_and_stages(tmp_path: Path, name: str) -> None:
    root = f"{tmp_path}/in/{name}"
    photo(f"{root}/{name}/{name}.png")
    options = {"cache": Cache("disk", dir=f"{tmp_path}/c/{name}"), "stage": Stage(f"{tmp_path}/s/{name}")}
    for option, kept in options.items():
        for _ in range(2):
            dataset = FastImageFolder(root, **{option: kept})  # type: ignore[arg-type]
            assert np.array_equal(dataset.__getitems__([0])[0][0], PIXELS)
            if dataset._remote is not None:
                dataset._remote.close()
    assert os.listdir(tmp_path / "c") == os.listdir(tmp_path / "s") == [name]


@names
def test_files_groups_and_datasets_of_hdf5(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = np.arange(32.0).reshape(8, 4)
    path = hdf5(f"{tmp_path}/{name}.h5", name, values)
    monkeypatch.chdir(tmp_path)
    for key in (name, f"/{name}", f"./{name}", f"g{name}/{name}", f"g{name}//{name}/", f"g{name}/./{name}"):
        rows = FastHDF5Dataset(path, key).__getitems__([*range(8)])
        assert np.array_equal(np.stack(rows), values)
        assert np.array_equal(patches(f"{path}/{key}", (8, 4), cache="ram")[0], values)
    assert np.array_equal(FastHDF5Dataset([f"{name}.h5"], {name: name})[3][name], values[3])
    assert np.array_equal(patches(f"{name}.h5/{name}", (8, 4))[0], values)


@names
@pytest.mark.parametrize(
    "kind", ["npy", "tif", "slices", "nii", "nii.gz", "zarr", "sharded", "group", "table"]
)
def test_volumes(tmp_path: Path, name: str, kind: str) -> None:
    ours, plain = tmp_path / name / f"{name}.{kind}", tmp_path / f"plain.{kind}"
    ours.parent.mkdir()
    volume: Any = str(ours)
    if kind in ("npy", "table"):
        np.save(plain if kind == "npy" else tmp_path / name / "x", VOXELS)
    elif kind == "tif":
        pytest.importorskip("tifffile").imwrite(plain, VOXELS, photometric="minisblack")
    elif kind == "slices":
        plain.mkdir()
        for number, part in enumerate(VOXELS):
            pytest.importorskip("tifffile").imwrite(plain / "x.tif", part, photometric="minisblack")
            os.rename(plain / "x.tif", plain / f"a{name[:200]}{number}.tif")
    elif kind in ("nii", "nii.gz"):
        nibabel = pytest.importorskip("nibabel")
        nibabel.save(nibabel.Nifti1Image(VOXELS, np.eye(4)), plain)
    else:
        zarr = pytest.importorskip("zarr")
        group = zarr.open_group(str(tmp_path / "z"), mode="w", zarr_format=3)
        shards = {"shards": (4, 6, 8)} if kind == "sharded" else {}
        group.create_array("x", data=VOXELS, chunks=(2, 6, 8), **shards)
        shutil.copytree(tmp_path / "z" / ("" if kind == "group" else "x"), plain)
        if kind == "group":
            os.rename(plain / "x", plain / name)
            volume = f"{ours}/{name}"
    if kind == "table":
        if any("\udc80" <= one <= "\udcff" for one in name):
            volume = f"{tmp_path}/{name}/x.npy"  # CSV is UTF-8
        else:
            volume = f"{tmp_path}/{name}/{name[:200]}.csv"
            os.rename(tmp_path / name / "x.npy", tmp_path / name / f"{name}.npy")
            with open(volume, "w", newline="", encoding="utf-8") as file:
                csv.writer(file).writerows([["volume"], [f"{name}.npy"]])
    else:
        os.rename(plain, ours)
    for given in (volume, [volume]) if kind != "table" else (volume,):
        assert np.array_equal(patches(given)[0], VOXELS)


@names
@pytest.mark.parametrize("ending", ["npy", "zarr"])
def test_stitched_volumes(tmp_path: Path, name: str, ending: str) -> None:
    np.save(tmp_path / "x.npy", VOXELS.astype(np.float32))
    dataset = patches(str(tmp_path / "x.npy"))
    out = tmp_path / "out" / f"{name}.{ending}"
    out.parent.mkdir()
    fastpipe.stitch([dataset[0][None]], dataset, out, weights="constant")
    assert os.listdir(out.parent) == [out.name]
    assert np.array_equal(patches(str(out))[0], VOXELS)


def row(index: int, rng: object = None) -> np.ndarray[Any, Any]:
    return np.full(3, index, np.float32)


@names
def test_generated_files_and_folders_of_results(tmp_path: Path, name: str) -> None:
    out = tmp_path / "out" / f"{name}.h5"
    out.parent.mkdir()
    fastpipe.generate(row, 4, out, seed=1, workers=0, probe=False, progress=False)
    assert os.listdir(out.parent) == [out.name]
    kept = fastpipe.memoize(row, dir=tmp_path / "kept" / name)
    assert kept(3).tolist() == kept(3).tolist() == [3, 3, 3]
    assert os.listdir(tmp_path / "kept") == [name]


@pytest.mark.few(3)
@names
def test_commands(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """They do as they are asked, and show names without carrying out what is in them."""
    name = name[:200]
    values = np.arange(40000.0).reshape(10000, 4)
    path, copy, root = f"{tmp_path}/{name}.h5", f"{tmp_path}/{name}2.h5", f"{tmp_path}/{name}"
    hdf5(path, name, values)
    photo(f"{root}/{name}/{name}.png")
    bad = Path(f"{root}/{name}/bad{name}.png")

    def run(*arguments: str) -> int:
        code = main(arguments)
        shown = "".join(capsys.readouterr())
        assert all(line.isprintable() or " " in line for line in shown.split("\n"))
        assert not set(shown) & {"\x1b", "\x9b", "\x7f", "\u202e", "\udcff", "\t", "\r"}
        return code

    assert run("inspect", path) == run("inspect", path, "--json") == 0
    assert run("repack", path, copy, f"--dataset={name}") == 0
    with h5py.File(copy) as file:
        assert np.array_equal(file[os.fsencode(name)][:], values)
    assert run("repack", f"{path}/{name}", f"{copy}.zarr", "--chunks", "1000,4") == 0
    assert np.array_equal(patches(f"{copy}.zarr", (10000, 4))[0], values)
    assert run("repack", f"{path}/other", f"{tmp_path}/x.zarr") == run("inspect", f"{tmp_path}/{name}3") == 2
    assert run("scan", path) == 0
    bad.write_bytes(b"x")
    quarantine = f"{tmp_path}/q{name}"
    assert run("scan", root) == 1 and run("scan", root, "--quarantine", quarantine) == 0
    assert not bad.exists()
    assert run("scan", "--restore", quarantine) == 0
    assert bad.read_bytes() == b"x"
    assert run("stage", root, f"{tmp_path}/s{name}") == run("stage", "--status", f"{tmp_path}/s{name}") == 0


def test_a_pattern_of_files_is_a_pattern_where_no_file_has_its_name(tmp_path: Path) -> None:
    for name, value in (("a1", 1.0), ("a2", 2.0), ("a[12]", 3.0)):
        np.save(tmp_path / f"{name}.npy", np.full((2, 2), value))
    assert [patch[0, 0] for patch in patches(f"{tmp_path}/a[12].npy", (2, 2))] == [3.0]
    (tmp_path / "a[12].npy").unlink()
    assert [patch[0, 0] for patch in patches(f"{tmp_path}/a[12].npy", (2, 2))] == [1.0, 2.0]


@pytest.mark.parametrize("name", ["a::b", "dir:", "x:"])
def test_a_path_with_two_slashes_is_no_url(tmp_path: Path, name: str) -> None:
    photo(f"{tmp_path}/{name}/c/1.png")
    np.save(tmp_path / name / "x.npy", VOXELS)
    hdf5(f"{tmp_path}/{name}/x.h5", "x", VOXELS)
    odd = f"{tmp_path}/{name}//"
    assert len(FastImageFolder.from_samples([("c/1.png", 0)], root=odd)) == 1
    assert np.array_equal(patches(f"{odd}x.npy")[0], VOXELS)
    assert np.array_equal(FastHDF5Dataset(f"{odd}x.h5", "x")[1], VOXELS[1])
    assert main(["inspect", f"{odd}x.h5"]) == 0


def test_keys_of_buckets(s3: Any, tmp_path: Path) -> None:
    """Of HDF5 files and of Zarr arrays, through a stage and as they are: a key is no pattern, and has no escapes."""
    bucket, values = s3.bucket(), np.arange(32.0).reshape(8, 4)
    zarr = pytest.importorskip("zarr").open_group(str(tmp_path / "z"), mode="w", zarr_format=3)
    zarr.create_array("x", data=VOXELS, chunks=(4, 6, 8))
    keys = ("brackets", "question", "percent", "hash", "colons", "spaces", "backslash", "emoji")
    named = [NAMES[key] for key in keys]
    for number, name in enumerate(named):
        local = hdf5(f"{tmp_path}/{number}.h5", "x", values + number)
        s3.put(bucket, f"{name}/{name}.h5", Path(local).read_bytes())
        for file in (tmp_path / "z" / "x").rglob("*"):
            if file.is_file():
                key = f"{name}/{name}.zarr/{file.relative_to(tmp_path / 'z' / 'x')}"
                s3.put(bucket, key, file.read_bytes())
    for number, name in enumerate(named):
        url = f"s3://{bucket}/{name}/{name}"
        stage = Stage(tmp_path / "stage")
        rows = FastHDF5Dataset(f"{url}.h5", "x", storage_options=s3.options, stage=stage)
        assert np.array_equal(rows[3], values[3] + number)
        assert np.array_equal(patches(f"{url}.zarr", storage_options=s3.options)[0], VOXELS)
