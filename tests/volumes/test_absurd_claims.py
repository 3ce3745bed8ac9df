"""Files that claim what no array has: an error that names them, or what the format's own library reads of them."""

from __future__ import annotations

import gzip
import json
import random
import shutil
import zipfile
from pathlib import Path
from typing import Any

import blosc2
import nibabel
import numpy as np
import pytest
import tifffile
import zarr

from fastpipe import Cache, FastPatchDataset
from fastpipe.errors import FastpipeError, OptionError, VolumeError
from fastpipe.sampling import Foreground, Grid, Uniform
from fastpipe.volumes.opening import open_volume

DATA = np.random.default_rng(0).integers(0, 200, (12, 14)).astype("i4")
METADATA_2: dict[str, Any] = {
    "zarr_format": 2, "shape": [64, 64], "chunks": [8, 8], "dtype": "<f4", "compressor": {"id": "zstd", "level": 1},
    "fill_value": 3, "order": "C", "filters": None,
}  # fmt: skip
METADATA_3: dict[str, Any] = {
    "zarr_format": 3, "node_type": "array", "shape": [64, 64], "data_type": "float32", "fill_value": 3.0,
    "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [8, 8]}},
    "chunk_key_encoding": {"name": "default"}, "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
}  # fmt: skip


def metadata(version: int, **values: Any) -> dict[str, Any]:
    if version == 2:
        return METADATA_2 | values
    if "chunks" in values:
        values["chunk_grid"] = {"name": "regular", "configuration": {"chunk_shape": values.pop("chunks")}}
    return METADATA_3 | values


def write(path: Path, version: int, content: str) -> Path:
    path.mkdir()
    (path / (".zarray" if version == 2 else "zarr.json")).write_text(content)
    return path


@pytest.mark.hang_after(60)
@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize(
    "values",
    [
        {"chunks": [10**6, 10**6]}, {"chunks": [1 << 62, 8]}, {"chunks": [1 << 63, 1 << 63]}, {"shape": [10**9, 10**9]},
        {"shape": [2, 10**12], "chunks": [2, 10**12]}, {"shape": [10**12, 10**12], "chunks": [10**12, 10**12]},
        {"shape": [1 << 40, 64]},
    ],
)  # fmt: skip
def test_parts_of_huge_arrays_that_were_never_written_are_read(
    tmp_path: Path, version: int, values: dict[str, Any]
) -> None:
    path = write(tmp_path / "x", version, json.dumps(metadata(version, **values)))
    dataset = FastPatchDataset(
        path, (2, 2), sampling=Uniform(3), seed=0, threads=1, cache=Cache("ram", 1 << 20)
    )
    for index in range(3):
        first = dataset.places()[1][index]
        box = tuple(slice(at, at + 2) for at in first.tolist())
        assert np.array_equal(dataset[index], zarr.open_array(path, mode="r")[box])


@pytest.mark.parametrize("shape", [[1 << 50, 64], [1 << 62, 64]])
@pytest.mark.parametrize("options", [{"sampling": Grid()}, {"sampling": Foreground(2), "labels": True}])
def test_a_list_of_what_such_arrays_have_is_not_begun(
    tmp_path: Path, shape: list[int], options: dict[str, Any]
) -> None:
    path = write(tmp_path / "x", 2, json.dumps(metadata(2, shape=shape)))
    options = {**options, "labels": path} if "labels" in options else options
    with pytest.raises(OptionError, match=rf"{path}.*TiB, which is more memory than is free"):
        FastPatchDataset(path, (2, 2), **options)


def test_a_huge_chunk_that_is_stored_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "x", 2, json.dumps(metadata(2, chunks=[10**6, 10**6])))
    (path / "0.0").write_bytes(b"any")
    with pytest.raises(FastpipeError, match=str(path)):
        FastPatchDataset(path, (2, 2), sampling=Uniform(1), seed=0)[0]


WRONG = [-1, 0, 1.5, "8", None, [1], {}, 10**400]


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize(
    "values",
    [
        *({"chunks": [value, 8]} for value in WRONG[:-1]), *({"shape": [value, 64]} for value in WRONG if value != 0),
        {"shape": [1 << 63, 64]}, {"shape": [1 << 40, 1 << 40], "chunks": [1, 1]},
        *({"shape": [2] * rank, "chunks": [1] * rank} for rank in (33, 65, 1000)),
        *({name: kind} for name in ("dtype", "data_type") for kind in ("|V1000000000000", "[[", "<U9999999999", "|O")),
        {"fill_value": 10**400}, {"fill_value": "text"}, {"fill_value": {}}, {"codecs": 5, "filters": 5},
    ],
)  # fmt: skip
def test_metadata_that_cannot_be(tmp_path: Path, version: int, values: dict[str, Any]) -> None:
    if not set(values) & set(metadata(version)) - {"chunks"} and "chunks" not in values:
        values = {"shape": [-1, -1]}  # a key of the other version
    path = write(tmp_path / "x", version, json.dumps(metadata(version, **values)))
    with pytest.raises(FastpipeError, match=str(path)) as caught:
        FastPatchDataset(path, (2, 2))
    assert len(str(caught.value)) < 1500
    (path / "c" / "0").mkdir(parents=True)  # what its metadata call a chunk, and one far from the first
    for chunk in ("c/0/0", "c/0/9", "0.0", "9.9"):
        (path / chunk).write_bytes(b"x")
    with pytest.raises(FastpipeError, match=str(path)):
        FastPatchDataset(path, (2, 2), stage=tmp_path / "stage")


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize(
    "content", ["[" * 200_000, '{"a":' * 200_000, "", "[]", '{"shape": ' + "9" * 10_000 + "}"]
)
def test_text_that_is_no_metadata(tmp_path: Path, version: int, content: str) -> None:
    path = write(tmp_path / "x", version, content)
    with pytest.raises(VolumeError, match=f"{path}/.* is damaged"):
        open_volume(path)
    (tmp_path / "group").mkdir()
    (tmp_path / "group" / ".zgroup").write_text("{}")
    shutil.move(path, tmp_path / "group" / "x")
    with pytest.raises(VolumeError, match="is a Zarr group"):
        open_volume(tmp_path / "group")


@pytest.mark.parametrize(
    "values", [{"blockSize": [10**6, 10**6]}, {"dimensions": [1 << 62] * 2}, {"blockSize": [0, 8]}]
)
def test_blocks_of_n5_that_cannot_be(tmp_path: Path, values: dict[str, Any]) -> None:
    about = {"dimensions": [64, 64], "blockSize": [8, 8], "dataType": "uint8", "compression": {"type": "raw"}}
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "attributes.json").write_text(json.dumps(about | values))
    with pytest.raises(VolumeError, match=str(tmp_path / "x")):
        open_volume(tmp_path / "x")


@pytest.mark.parametrize("version", [1, 2, 3])
@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("'<f4'", "(4611686018427387904,)"), ("'<f4'", "(-1, 4)"), ("'<f4'", "(1.5, 4)"), ("'<f4'", "(2**62,)"),
        ("'<f4'", "(0, 1180591620717411303424)"), ("'<f4'", f"({'1,' * 1000})"), ("'|O'", "(4, 4)"),
        ("__import__('os')", "(4, 4)"), ("'|V1000000000'", "(4, 4)"), ("{'names': ['a'], 'formats': ['O']}", "(4, 4)"),
        ("'<f4'", "(" * 300 + "4,)" * 300),
    ],
)  # fmt: skip
def test_headers_of_numpy_that_cannot_be(tmp_path: Path, kind: str, shape: str, version: int) -> None:
    header = f"{{'descr': {kind}, 'fortran_order': False, 'shape': {shape}}}\n".encode()
    length = len(header).to_bytes(2 if version == 1 else 4, "little")
    (tmp_path / "x.npy").write_bytes(b"\x93NUMPY" + bytes([version, 0]) + length + header + bytes(64))
    with pytest.raises(FastpipeError, match=r"x\.npy"):
        FastPatchDataset(tmp_path / "x.npy", (1, 1))


def test_a_packed_image_that_claims_more_than_it_can_unpack_to(tmp_path: Path) -> None:
    header = nibabel.Nifti1Image(DATA[..., None].astype("i2"), np.eye(4)).header
    content = bytearray(header.binaryblock + bytes(4 + 2 * DATA.size))
    content[40:48] = np.array([3, 32767, 32767, 32767], "<i2").tobytes()
    (tmp_path / "x.nii.gz").write_bytes(gzip.compress(bytes(content)))
    with pytest.raises(VolumeError, match=r"x\.nii\.gz is cut off, or its header is damaged"):
        FastPatchDataset(tmp_path / "x.nii.gz", (1, 1, 1))


def test_a_member_of_a_zip_file_that_unpacks_to_more_than_a_chunk(tmp_path: Path) -> None:
    path = tmp_path / "x.zarr.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr(".zarray", json.dumps(METADATA_2))
        file.writestr("0.0", bytes(1 << 24))
    with pytest.raises(VolumeError, match=r"0\.0 unpacks to 16 MiB, more than any chunk"):
        open_volume(path)


# ---- any change of a file ---------------------------------------------------------------------------


def _zarr(path: Path, version: Any, **options: Any) -> Any:
    zarr.create_array(path, data=DATA, chunks=(4, 5), zarr_format=version, fill_value=3, **options)
    return lambda: zarr.open_array(path, mode="r")[...]


def _file(write: Any, read: Any) -> Any:
    return lambda path: (write(path), lambda: read(path))[1]


PAGES = np.stack([DATA, DATA[::-1]]).astype("u2")
KINDS: dict[str, tuple[str, str, Any]] = {
    "zarr 2": ("x", ".zarray", lambda path: _zarr(path, 2)), "zarr 3": ("x", "zarr.json", lambda path: _zarr(path, 3)),
    "npy": ("x.npy", "", _file(lambda path: np.save(path, DATA), np.load)),
    "nii": ("x.nii", "", _file(
        lambda path: nibabel.save(nibabel.Nifti1Image(DATA[..., None].astype("i2"), np.eye(4)), path),
        lambda path: np.asanyarray(nibabel.load(path).dataobj))),  # type: ignore[attr-defined]
    "tiff": ("x.tif", "", _file(
        lambda path: tifffile.imwrite(path, PAGES, photometric="minisblack", compression="zlib", rowsperstrip=5),
        tifffile.imread)),
    "tiff raw": ("x.tif", "", _file(
        lambda path: tifffile.imwrite(path, PAGES, photometric="minisblack"), tifffile.imread)),
    "b2nd": ("x.b2nd", "", _file(
        lambda path: blosc2.asarray(DATA, urlpath=str(path), chunks=(6, 14), blocks=(3, 7)),
        lambda path: blosc2.open(str(path))[...])),
}  # fmt: skip
VALUES = [
    0,
    -1,
    1,
    7,
    1 << 31,
    1 << 62,
    10**40,
    1.5,
    True,
    None,
    "",
    "x",
    [],
    {},
    [1],
    "<f4",
    ">i4",
    {"id": "zlib"},
]


def _changed(content: bytes, draw: random.Random, is_json: bool) -> bytes:
    if is_json and draw.random() < 0.7:
        found = json.loads(content)
        key = draw.choice(sorted(found))
        if isinstance(found[key], list) and found[key] and draw.random() < 0.5:
            found[key][draw.randrange(len(found[key]))] = draw.choice(VALUES)
        else:
            found[key] = draw.choice(VALUES)
        return json.dumps(found).encode()
    if draw.random() < 0.1:
        return content[: draw.randrange(len(content))]
    made = bytearray(content)
    for _ in range(draw.randint(1, 3)):
        at, size = draw.randrange(min(len(made), 400)), draw.choice([1, 2, 4, 8])
        made[at : at + size] = bytes([draw.choice([0, 1, 0x7F, 0x80, 0xFF])] * size)[: len(made) - at]
    return bytes(made)


def _check_changed(tmp_path: Path, kind: str, count: int) -> None:
    name, inside, make = KINDS[kind]
    read = make(tmp_path / name)
    file = tmp_path / name / inside if inside else tmp_path / name
    content, draw = file.read_bytes(), random.Random(kind)
    for number in range(count):
        file.unlink()  # not the same file: who has it mapped keeps what it was
        file.write_bytes(_changed(content, draw, bool(inside)))
        try:
            shape = open_volume(tmp_path / name).shape
            if np.prod(shape, dtype=float) > 1 << 20:
                continue
            made = FastPatchDataset(tmp_path / name, shape, sampling=Grid(), cache=Cache("ram", 1 << 20))[0]
        except FastpipeError as error:
            assert name in str(error), f"change {number}"
            continue
        try:
            expected = np.asarray(read())
        except Exception:  # fastpipe does not look at all that the library does
            continue
        assert expected.astype(made.dtype).tobytes() == made.tobytes(), f"change {number}"


@pytest.mark.hang_after(120)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_file_is_read_as_by_its_library_or_named(tmp_path: Path, kind: str) -> None:
    _check_changed(tmp_path, kind, 40)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_any_changed_file_is_read_as_by_its_library_or_named(tmp_path: Path, kind: str) -> None:
    _check_changed(tmp_path, kind, 2000)


@pytest.mark.hang_after(60)
@pytest.mark.parametrize("tag", ["TileWidth", "TileLength", "ImageWidth", "ImageLength"])
@pytest.mark.parametrize("value", [0, 2**31])
def test_sides_of_a_tiff_that_cannot_be(tmp_path: Path, tag: str, value: int) -> None:
    tifffile.imwrite(
        tmp_path / "x.tif",
        np.ones((32, 32), "u1"),
        photometric="minisblack",
        tile=(16, 16),
        compression="zlib",
    )
    with tifffile.TiffFile(tmp_path / "x.tif", mode="r+b") as file:
        file.pages[0].tags[tag].overwrite(value, dtype="I")  # type: ignore[union-attr]
    with pytest.raises(FastpipeError, match=r"x\.tif"):
        FastPatchDataset(tmp_path / "x.tif", (16, 16), sampling=Uniform(1), seed=0, threads=1)[0]
