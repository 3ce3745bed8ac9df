"""What is in a data file is data: nothing of it is run, and it leads to no other file."""

from __future__ import annotations

import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import blosc2
import numpy as np
import pytest
import tifffile

from fastpipe import FastPatchDataset
from fastpipe.errors import VolumeError
from fastpipe.sampling import Grid
from fastpipe.volumes.opening import open_volume

DATA = np.arange(16, dtype="u2").reshape(4, 4)


class Harmful:
    """An object that makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (str(self.path), "w")


def test_blosc2_opens_no_file_for_us(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Releases before 4.14 bring what a file of a lazy array holds to life when they open it."""
    array = blosc2.asarray(DATA, urlpath=str(tmp_path / "x.b2nd"), meta={"mine": 1})
    array.schunk.vlmeta["note"] = "of a user"
    (array + 1).save(str(tmp_path / "lazy.b2nd"))
    blosc2.Proxy(array, urlpath=str(tmp_path / "proxy.b2nd"))
    for function in ("open", "open_lazyarray", "open_b2object", "schunk_from_cframe", "ndarray_from_cframe"):
        monkeypatch.delattr(blosc2, function, raising=False)
    for name in ("lazy.b2nd", "proxy.b2nd"):
        with pytest.raises(VolumeError, match=rf"{name} cannot be opened by Blosc2: .* when it is opened"):
            open_volume(tmp_path / name)
    assert np.array_equal(FastPatchDataset(tmp_path / "x.b2nd", (4, 4), sampling=Grid())[0], DATA)


@pytest.mark.parametrize("marker", ["LazyArray", "b2o", "proxy-source", "vlarray"])
def test_layers_by_which_blosc2_makes_something_else_are_refused(tmp_path: Path, marker: str) -> None:
    blosc2.asarray(DATA, urlpath=str(tmp_path / "x.b2nd"), meta={marker: {"UDF": "open('ran', 'w')"}})
    with pytest.raises(VolumeError, match=f"it is a {marker}, whose values are made when it is opened"):
        open_volume(tmp_path / "x.b2nd")


def test_objects_of_numpy_are_not_unpickled(tmp_path: Path) -> None:
    array = np.array([Harmful(tmp_path / "ran")], object)
    np.save(tmp_path / "x.npy", array, allow_pickle=True)
    np.savez(tmp_path / "x.npz", x=array)
    (tmp_path / "pickle.npy").write_bytes(pickle.dumps(array[0]))
    for name, said in (
        ("x.npy", "holds Python objects, which could run code"),
        ("x.npz", r"holds arrays of NumPy's: save the one that is needed with numpy\.save"),
        ("pickle.npy", "not a volume in a supported format"),
    ):
        with pytest.raises(VolumeError, match=said):
            open_volume(tmp_path / name)
    assert not (tmp_path / "ran").exists()


def ome(path: Path, other: str, parts: str = "") -> None:
    """An image of two planes, the second of which is in another file."""
    plane = '<TiffData FirstZ="%d" IFD="0" PlaneCount="1"><UUID FileName="%s">urn:uuid:%d</UUID></TiffData>'
    text = (
        f'<?xml version="1.0" encoding="UTF-8"?>{parts}<OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06" '
        'UUID="urn:uuid:0"><Image ID="Image:0"><Pixels ID="Pixels:0" DimensionOrder="XYZCT" Type="uint16" '
        'SizeX="4" SizeY="4" SizeZ="2" SizeC="1" SizeT="1"><Channel ID="Channel:0:0" SamplesPerPixel="1"/>'
        f"{plane % (0, path.name, 0)}{plane % (1, other, 1)}</Pixels></Image></OME>"
    )
    tifffile.imwrite(path, DATA, photometric="minisblack", description=text, metadata=None)


@pytest.mark.hang_after(30)
@pytest.mark.parametrize(
    "where", ["beside", "../", "absolute", "fifo", "missing", "http://localhost:1/x.tif"]
)
def test_other_files_that_a_tiff_names_are_not_opened(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    other = tmp_path / "data" / "2.tif" if where in ("beside", "fifo") else tmp_path / "secret.tif"
    if where == "fifo":
        os.mkfifo(other)  # which would be waited for
    elif where != "missing":
        tifffile.imwrite(other, DATA + 1, photometric="minisblack")
    names = {"beside": "2.tif", "fifo": "2.tif", "../": "../secret.tif", "absolute": str(other)}
    ome(tmp_path / "data" / "1.ome.tif", names.get(where, where))
    opened, handle = [], tifffile.tifffile.FileHandle
    monkeypatch.setattr(
        handle, "open", lambda self, old=handle.open: (opened.append(str(self._file)), old(self))[1]
    )
    with pytest.raises(VolumeError, match=r"1\.ome\.tif refers to pages in other files: write its series"):
        FastPatchDataset(tmp_path / "data" / "1.ome.tif", (1, 4, 4))
    assert {os.path.basename(path) for path in opened} == {"1.ome.tif"}


@pytest.mark.hang_after(30)
def test_entities_of_xml_are_not_expanded_without_end(tmp_path: Path) -> None:
    names = [f'<!ENTITY a{n} "{f"&a{n - 1};" * 10 if n else "x" * 10}">' for n in range(12)]
    ome(tmp_path / "x.ome.tif", "&a11;", f"<!DOCTYPE OME [{''.join(names)}]>")
    with pytest.raises(VolumeError, match=r"x\.ome\.tif"):
        open_volume(tmp_path / "x.ome.tif")


def test_members_of_a_zip_file_are_not_unpacked(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    with zipfile.ZipFile(tmp_path / "data" / "x.zip", "w") as file:
        file.writestr("../ran", "x")
        file.writestr("/../../ran/.zarray", "{}")
    for inside in ("", "/..", "/../ran", "/../../ran"):
        with pytest.raises(VolumeError, match=r"x\.zip"):
            open_volume(f"{tmp_path}/data/x.zip{inside}")
    assert os.listdir(tmp_path) == ["data"]


@pytest.mark.parametrize("name", [".zarray", "zarr.json", "attributes.json"])
def test_metadata_lead_to_no_other_store(tmp_path: Path, name: str) -> None:
    """Settings of tensorstore's, which it takes from a script, are none where a file has them."""
    spec = '{"driver": "zarr", "kvstore": {"driver": "http", "base_url": "http://localhost:1/"}}'
    (tmp_path / name).write_text(spec)
    with pytest.raises(VolumeError, match=str(tmp_path)):
        open_volume(tmp_path)
