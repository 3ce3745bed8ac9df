"""Files that claim what no array has: an error that names them, or what the format's own library reads of them."""

from __future__ import annotations

import gzip
import json
import zipfile
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import tifffile
import zarr

from fastpipe import Cache, FastPatchDataset
from fastpipe.errors import FastpipeError, OptionError, VolumeError
from fastpipe.sampling import Foreground, Grid, Uniform
from fastpipe.volumes.opening import open_volume

METADATA_2: dict[str, Any] = {
    "zarr_format": 2, "shape": [64, 64], "chunks": [8, 8], "dtype": "<f4", "compressor": {"id": "zstd", "level": 1},
    "fill_value": 3, "order": "C", "filters": None,
}  # fmt: skip
METADATA_3: dict[str, Any] = {
    "zarr_format": 3, "node_type": "array", "shape": [64, 64], "data_type": "float32", "fill_value": 3.0,
    "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [8, 8]}},
    "chunk_key_encoding": {"name": "default"}, "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
}  # fmt: skip


def write(path: Path, version: int, **values: Any) -> Path:
    """Writes metadata of Zarr with other values, and no chunk."""
    path.mkdir()
    if version == 3 and "chunks" in values:
        values["chunk_grid"] = {"name": "regular", "configuration": {"chunk_shape": values.pop("chunks")}}
    content = json.dumps((METADATA_2 if version == 2 else METADATA_3) | values)
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
    path, cache = write(tmp_path / "x", version, **values), Cache("ram", 1 << 20)
    dataset = FastPatchDataset(path, (2, 2), sampling=Uniform(2), seed=0, threads=1, cache=cache)
    for index in range(2):
        box = tuple(slice(at, at + 2) for at in dataset.places()[1][index].tolist())
        assert np.array_equal(dataset[index], zarr.open_array(path, mode="r")[box])


@pytest.mark.parametrize("shape", [[1 << 50, 64], [1 << 62, 64]])
def test_a_list_of_all_patches_of_a_huge_array_is_refused(tmp_path: Path, shape: list[int]) -> None:
    path = write(tmp_path / "x", 2, shape=shape)
    for labels, sampling in ((None, Grid()), (path, Foreground(2))):
        with pytest.raises(OptionError, match=rf"{path}.*TiB, which is more memory than is free"):
            FastPatchDataset(path, (2, 2), labels=labels, sampling=sampling)


def test_a_huge_chunk_that_is_stored_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "x", 2, chunks=[10**6, 10**6])
    (path / "0.0").write_bytes(b"any")
    with pytest.raises(FastpipeError, match=str(path)):
        FastPatchDataset(path, (2, 2), sampling=Uniform(1), seed=0)[0]


@pytest.mark.parametrize("version", [2, 3])
def test_metadata_that_cannot_be_are_named_also_where_the_array_is_staged(
    tmp_path: Path, version: int
) -> None:
    wrong = [-1, 0, 1.5, "8", None, [1], {}, 10**400]
    cases = [
        *({"chunks": [value, 8]} for value in wrong[:-1]), *({"shape": [value, 64]} for value in wrong if value != 0),
        {"shape": [1 << 63, 64]}, {"shape": [1 << 40, 1 << 40], "chunks": [1, 1]},
        *({"shape": [2] * rank, "chunks": [1] * rank} for rank in (33, 65, 1000)),
        *({"dtype" if version == 2 else "data_type": kind} for kind in ("|V1000000000000", "[[", "<U9999999999", "|O")),
        {"fill_value": 10**400}, {"fill_value": "text"}, {"fill_value": {}}, {"codecs": 5, "filters": 5},
    ]  # fmt: skip
    for number, values in enumerate(cases):
        path = write(tmp_path / f"x{number}", version, **values)
        with pytest.raises(FastpipeError, match=str(path)) as caught:
            FastPatchDataset(path, (2, 2))
        assert len(str(caught.value)) < 1500
        (path / "c" / "0").mkdir(parents=True)  # what its metadata call a chunk, and one far from the first
        for chunk in ("c/0/0", "c/0/9", "0.0", "9.9"):
            (path / chunk).write_bytes(b"x")
        with pytest.raises(FastpipeError, match=str(path)):
            FastPatchDataset(path, (2, 2), stage=tmp_path / "stage")


@pytest.mark.parametrize(
    "values", [{"blockSize": [10**6, 10**6]}, {"dimensions": [1 << 62] * 2}, {"blockSize": [0, 8]}]
)
def test_impossible_blocks_of_n5_are_named(tmp_path: Path, values: dict[str, Any]) -> None:
    about = {"dimensions": [64, 64], "blockSize": [8, 8], "dataType": "uint8", "compression": {"type": "raw"}}
    (tmp_path / "attributes.json").write_text(json.dumps(about | values))
    with pytest.raises(VolumeError, match=str(tmp_path)):
        open_volume(tmp_path)


def test_a_packed_image_that_claims_more_than_it_can_unpack_to_is_named(tmp_path: Path) -> None:
    header = nibabel.Nifti1Image(np.zeros((12, 14, 1), "i2"), np.eye(4)).header
    content = bytearray(header.binaryblock + bytes(400))
    content[40:48] = np.array([3, 32767, 32767, 32767], "<i2").tobytes()
    (tmp_path / "x.nii.gz").write_bytes(gzip.compress(bytes(content)))
    with pytest.raises(VolumeError, match=r"x\.nii\.gz is truncated, or its header is damaged"):
        FastPatchDataset(tmp_path / "x.nii.gz", (1, 1, 1))


def test_a_member_of_a_zip_file_that_unpacks_to_more_than_a_chunk_is_named(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.zarr.zip", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr(".zarray", json.dumps(METADATA_2))
        file.writestr("0.0", bytes(1 << 24))
    with pytest.raises(VolumeError, match=r"0\.0 unpacks to 16 MiB, more than any chunk"):
        open_volume(tmp_path / "x.zarr.zip")


@pytest.mark.hang_after(60)
@pytest.mark.parametrize("tag", ["TileWidth", "TileLength", "ImageWidth", "ImageLength"])
@pytest.mark.parametrize("value", [0, 2**31])
def test_impossible_sides_of_a_tiff_are_named(tmp_path: Path, tag: str, value: int) -> None:
    path, options = tmp_path / "x.tif", {"photometric": "minisblack", "tile": (16, 16), "compression": "zlib"}
    tifffile.imwrite(path, np.ones((32, 32), "u1"), **options)
    with tifffile.TiffFile(path, mode="r+b") as file:
        file.pages[0].tags[tag].overwrite(value, dtype="I")  # type: ignore[union-attr]
    with pytest.raises(FastpipeError, match=r"x\.tif"):
        FastPatchDataset(path, (16, 16), sampling=Uniform(1), seed=0, threads=1)[0]
