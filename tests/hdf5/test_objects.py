"""All datasets of a file: each once, in order, whatever links lead where and whatever cannot be opened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from fastpipe import FastHDF5Dataset
from fastpipe.cli import main
from fastpipe.errors import HDF5Error
from fastpipe.hdf5.opening import datasets_of, walk_datasets


def names_of(path: Path) -> list[str]:
    with h5py.File(path) as file:
        return [name for name, item in walk_datasets(file, "x.h5") if not isinstance(item, HDF5Error)]


def listed_by_h5py(path: Path) -> list[str]:
    found: list[str] = []
    with h5py.File(path) as file:
        file.visititems(
            lambda name, item: found.append(f"/{name}") if isinstance(item, h5py.Dataset) else None
        )
    return found


@pytest.mark.parametrize("libver", ["earliest", "latest"])
@pytest.mark.parametrize("track_order", [False, True])
def test_datasets_are_those_of_visititems(tmp_path: Path, libver: Any, track_order: bool) -> None:
    path = tmp_path / "x.h5"
    with h5py.File(path, "w", libver=libver, track_order=track_order) as file:
        for name in ("b", "a/c", "a/b/d", "Z", "ü", "z/y/x", "a/a"):
            file[name] = 1
        file["again"] = file["a/b/d"]  # one dataset of two names
        file["z/up"], file["z/y/own"] = file["z"], file["z/y"]
        file["a/root"] = file["/"]
        file["soft"], file["loop"] = h5py.SoftLink("/b"), h5py.SoftLink("/loop")
        file["out"], file["gone"] = h5py.ExternalLink("x.h5", "/out"), h5py.ExternalLink("nothing.h5", "/")
        file["type"], file["empty"] = np.dtype("i4"), h5py.Empty("f4")
    assert names_of(path) == listed_by_h5py(path)


def test_groups_that_are_nested_deeply(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w", libver="latest") as file:
        group = file
        for _ in range(1200):
            group = group.create_group("g")
        group["x"] = np.arange(3)
    name = "/g" * 1200 + "/x"
    assert names_of(tmp_path / "x.h5") == [name]
    assert FastHDF5Dataset(tmp_path / "x.h5", name)[2] == 2
    assert main(["inspect", str(tmp_path / "x.h5")]) == 0
    assert main(["scan", str(tmp_path / "x.h5")]) == 0


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """A file with three datasets, of which the header of the second is damaged."""
    path = tmp_path / "x.h5"
    with h5py.File(path, "w", libver="latest") as file:
        for name in ("group/a", "group/b", "group/c"):
            file[name] = np.arange(5)
        address = h5py.h5o.get_info(file["group/b"].id).addr
    content = bytearray(path.read_bytes())
    content[address + 20] ^= 1
    path.write_bytes(content)
    return path


def test_others_are_found_behind_what_cannot_be_opened(damaged: Path) -> None:
    assert names_of(damaged) == ["/group/a", "/group/c"]
    assert FastHDF5Dataset(damaged, "group/c")[4] == 4
    with pytest.raises(KeyError, match=r"has no dataset 'x'; it has group/a, group/c"):
        FastHDF5Dataset(damaged, "x")
    with pytest.raises(HDF5Error, match=r"x\.h5: 'group/b' cannot be opened, it may be damaged"):
        FastHDF5Dataset(damaged, "group/b")
    with h5py.File(damaged) as file, pytest.raises(HDF5Error, match=r"y\.h5, /group/b cannot be read"):
        datasets_of(file, "y.h5")


def test_the_command_names_what_cannot_be_opened(damaged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scan", str(damaged)]) == 1
    said = capsys.readouterr().out
    assert "/group/b" in said
    assert "1 of 3 chunks cannot be read" in said or "group/b" in said
    for arguments in (["inspect", str(damaged)], ["repack", str(damaged), f"{damaged}.out"]):
        assert main(arguments) == 2
        assert "x.h5, /group/b cannot be read, it may be damaged" in capsys.readouterr().err


def test_names_that_are_no_utf8(tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file[b"caf\xe9"] = np.arange(6)
        properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        properties.set_chunk((2,))
        properties.set_scaleoffset(h5py.h5z.SO_INT, 0)  # which only the library reads
        space = h5py.h5s.create_simple((6,))
        made = h5py.h5d.create(file.id, b"th\xe9", h5py.h5t.STD_I32LE, space, properties)
        h5py.Dataset(made)[...] = np.arange(6)
    for name in ("caf\udce9", "th\udce9"):
        assert [int(row) for row in FastHDF5Dataset(path, name)] == list(range(6))
