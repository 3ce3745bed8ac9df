"""Datasets of HDF5 files as volumes: only of the file that was named, also where only the library reads them."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import numpy as np
import pytest
from volume_kit import reader_of, whole

from fastpipe.errors import HDF5Error, OptionError, VolumeError
from fastpipe.hdf5.files import SampleFile
from fastpipe.volumes.opening import open_volume


def add_virtual(file: Any, path: Path, name: str, data: Any) -> None:
    layout = h5py.VirtualLayout(data.shape, data.dtype)
    layout[:] = h5py.VirtualSource(path, name, data.shape)
    file.create_virtual_dataset("virtual", layout)


@pytest.mark.parametrize("name", ["contiguous", "chunked", "virtual"])
def test_a_link_into_another_file_is_followed_by_the_library(tmp_path: Path, name: str) -> None:
    path, data = tmp_path / "x.h5", np.arange(1000, dtype="u2").reshape(10, 10, 10)
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["contiguous"] = data
        file.create_dataset("chunked", data=data, chunks=(5, 5, 5))
        add_virtual(file, tmp_path / "other.h5", "chunked", data)
    with h5py.File(path, "w") as file:
        file["own"], file["soft"] = data[::-1], h5py.SoftLink("/own")
        file["linked"] = h5py.ExternalLink("other.h5", f"/{name}")
        file["lost"] = h5py.ExternalLink("nothing.h5", f"/{name}")
    volume = open_volume(path / "linked")
    assert "it lies in another file, " in volume.how
    assert volume.state() == ("", "")  # which other processes change without this one
    np.testing.assert_array_equal(whole(volume), data)
    np.testing.assert_array_equal(whole(open_volume(path / "soft")), data[::-1])
    said = r"x\.h5: 'lost' is a link into another file, nothing\.h5, in which"
    for call in (lambda: open_volume(path / "lost"), lambda: SampleFile(path, ["lost"])):
        with pytest.raises(HDF5Error, match=said):
            call()


def test_a_dataset_that_was_never_written_has_units_of_a_sensible_size(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", (300, 300, 300), "f4", fillvalue=3)
    volume, out = open_volume(tmp_path / "x.h5" / "x"), np.zeros((2, 299, 3), "f4")
    assert volume.unit_nbytes <= 1 << 20
    reader_of(volume).read([100, 1, 200], out)
    assert (out == 3).all()


@pytest.mark.parametrize("name", ["packed", "virtual"])
def test_a_filter_that_only_the_library_knows_is_there_in_other_processes(tmp_path: Path, name: str) -> None:
    data = np.random.default_rng(0).random((16, 16, 16)).astype("f4")
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("packed", data=data, chunks=(8, 8, 8), **hdf5plugin.Zfp(reversible=True))
        add_virtual(file, tmp_path / "x.h5", "packed", data)
    (tmp_path / "volume").write_bytes(pickle.dumps(open_volume(tmp_path / "x.h5" / name)))
    code = "import pickle, sys, numpy as np; volume = pickle.load(open(sys.argv[1], 'rb')); "
    code += "volume.open().read(np.zeros(1, np.int64), [np.zeros(volume.unit_nbytes, np.uint8)])"
    subprocess.run([sys.executable, "-c", code, tmp_path / "volume"], check=True)


def test_elements_of_a_type_that_numpy_does_not_have_are_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        space, kind = h5py.h5s.create_simple((4,)), h5py.h5t.STD_I64LE.copy()
        kind.set_size(9)
        h5py.h5d.create(file.id, b"x", kind, space)
    with pytest.raises(OptionError, match=r"x\.h5: /x .*a type that NumPy does not have"):
        open_volume(tmp_path / "x.h5" / "x")


@pytest.mark.parametrize("name", ["x.mat", "x.h5", "x"])
def test_a_file_with_a_user_block_is_read(tmp_path: Path, name: str) -> None:
    """As MATLAB writes them: its own header stands in front of HDF5's signature."""
    with h5py.File(tmp_path / name, "w", userblock_size=512) as file:
        file["x"] = np.arange(12).reshape(3, 4)
    with open(tmp_path / name, "r+b") as raw:
        raw.write(b"MATLAB 7.3 MAT-file")
    np.testing.assert_array_equal(whole(open_volume(tmp_path / name / "x")), np.arange(12).reshape(3, 4))


def test_a_file_that_is_replaced_before_the_library_reads_it_is_noticed(tmp_path: Path) -> None:
    for name, value in (("x.h5", 1), ("new.h5", 2)):
        with h5py.File(tmp_path / name, "w") as file:
            data = np.full((64, 64), value, "u1")
            file.create_dataset("x", data=data, chunks=(32, 64), scaleoffset=0)
    volume = open_volume(tmp_path / "x.h5" / "x")
    reader, out = volume.open(), np.zeros(volume.unit_nbytes, np.uint8)
    os.replace(tmp_path / "new.h5", tmp_path / "x.h5")
    with pytest.raises(VolumeError, match=r"x\.h5 has changed since it was opened"):
        reader.read(np.array([0]), [out])
