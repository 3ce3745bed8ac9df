"""Where a file should be is a fifo, which would be waited for, a socket or a folder."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from generated import made, plain
from PIL import Image
from torchvision.datasets import ImageFolder
from torchvision.transforms import PILToTensor
from volume_files import write_zarr

from fastpipe import BadSamples, FastHDF5Dataset, FastImageFolder, FastLoader, FastPatchDataset
from fastpipe.cli import main
from fastpipe.core.files import open_output, remove_tree, write_whole
from fastpipe.errors import BadSampleError, FastpipeError, HDF5Error, StageError, VolumeError
from fastpipe.hdf5.repack import unfinished_path
from fastpipe.sampling import Grid
from fastpipe.volumes import tensorstore

pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="run it where there are fifos")

Put = Callable[[Path], None]


@pytest.fixture(params=["fifo", "socket", "folder"])
def put(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Put:
    """Puts it at a path."""

    def put(path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if request.param == "fifo":
            os.mkfifo(path)
        elif request.param == "folder":
            path.mkdir()
        else:
            monkeypatch.chdir(path.parent)  # names of sockets are short
            with socket.socket(socket.AF_UNIX) as opened:
                opened.bind(path.name)

    return put


def fifo(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(path)
    return path


def photo(root: Path) -> Path:
    """A folder of one image."""
    (root / "a").mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (9, 9)).save(root / "a" / "y.png")
    return root


@pytest.mark.parametrize("staged", [False, True])
def test_an_image_that_is_no_file_is_a_bad_sample(put: Put, tmp_path: Path, staged: bool) -> None:
    put(tmp_path / "data" / "a" / "x.jpg")
    stage = tmp_path / "stage" if staged else None
    dataset = FastImageFolder(photo(tmp_path / "data"), PILToTensor(), stage=stage, bad_samples="skip")
    assert staged or list(dataset.samples) == ImageFolder(tmp_path / "data").samples
    assert sum(len(batch[1]) for batch in FastLoader(dataset, batch_size=2)) == 1
    dataset.close()
    if len(dataset) == 2:  # a folder is none of its samples, and a stage has none but files
        with pytest.raises(BadSampleError, match=r"Not a regular file|No such device") as raised:
            FastImageFolder(tmp_path / "data")[0]
        assert raised.value.path == str(tmp_path / "data" / "a" / "x.jpg")
    with pytest.raises(OSError, match=r"x\.h5"):
        put(tmp_path / "x.h5")
        FastHDF5Dataset(tmp_path / "x.h5", "data", stage=stage)


@pytest.mark.parametrize("name", ["direct", "soft", "group/direct"])
def test_a_link_of_an_hdf5_file_to_no_file_is_an_error(put: Put, tmp_path: Path, name: str) -> None:
    put(tmp_path / "other.h5")
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["direct"] = file["group/direct"] = h5py.ExternalLink("other.h5", "x")
        file["soft"] = h5py.SoftLink("group/direct")
    with pytest.raises(HDF5Error, match=r"is a link into .*other\.h5, which is not a file"):
        FastHDF5Dataset(tmp_path / "x.h5", name)
    with pytest.raises(HDF5Error, match=r"is a link into .*other\.h5, which is not a file"):
        FastPatchDataset(tmp_path / "x.h5" / name, (2, 2), sampling=Grid())


@pytest.mark.parametrize(
    "name", ["x.tif", "x.nii", "x.nii.gz", "x.npy", "x.b2nd", "x.h5", "x.csv", "t/0.tif",
             *(f"x.zarr/{name}" for name in ("zarr.json", ".zarray", ".zgroup", ".zmetadata"))],
)  # fmt: skip
def test_a_volume_that_is_no_file_is_an_error(put: Put, tmp_path: Path, name: str) -> None:
    put(tmp_path / name)
    with pytest.raises((OSError, FastpipeError)):
        FastPatchDataset(tmp_path / name.partition("/")[0], (4, 4, 4), sampling=Grid())


N5 = {"dimensions": [4, 4, 4], "blockSize": [4, 4, 4], "dataType": "uint16", "compression": {"type": "raw"}}


def test_a_chunk_that_is_no_file_is_an_error(put: Put, tmp_path: Path) -> None:
    write_zarr(tmp_path / "x.zarr", np.ones((4, 4, 4), "u2"), (4, 4, 4), version=2)
    (tmp_path / "x.zarr" / "0.0.0").unlink()
    put(tmp_path / "x.zarr" / "0.0.0")
    dataset = FastPatchDataset(tmp_path / "x.zarr", (4, 4, 4), sampling=Grid())
    with pytest.raises(OSError, match=r"0\.0\.0"):
        dataset[0]


@pytest.mark.parametrize("name", ["attributes.json", "0/0/0"])
def test_tensorstore_waits_for_no_fifo(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorstore", reason="pip install '.[volume]'")
    monkeypatch.setattr(tensorstore, "_PATIENCE_S", 0.1)
    fifo(tmp_path / "x.n5" / name)
    if name != "attributes.json":
        (tmp_path / "x.n5" / "attributes.json").write_text(json.dumps(N5))
    with pytest.raises(VolumeError, match=f"{name} is a fifo, not a file: remove it"):
        FastPatchDataset(tmp_path / "x.n5", (4, 4, 4), sampling=Grid())[0]


@pytest.mark.parametrize("command", ["inspect", "scan", "verify", "repack"])
@pytest.mark.parametrize("name", ["x.h5", "x.npy", "x.tif", "x.nii.gz"])
def test_commands_refuse_a_fifo(tmp_path: Path, command: str, name: str) -> None:
    path = str(fifo(tmp_path / name))
    assert main([command, path, *([f"{path}.out"] if command == "repack" else [])]) == 2


@pytest.mark.parametrize("command", ["scan", "verify"])
def test_commands_name_an_image_that_is_a_fifo(tmp_path: Path, command: str, capsys: Any) -> None:
    fifo(tmp_path / "data" / "a" / "x.jpg")
    assert main([command, str(photo(tmp_path / "data"))]) == {"scan": 1, "verify": 0}[command]
    assert "x.jpg" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name", ["", ".partial", *(f".partial/{name}" for name in ("lock", "journal", "function", "00000.data"))]
)
def test_generate_uses_no_file_that_is_none(put: Put, tmp_path: Path, name: str) -> None:
    put(tmp_path / f"x.h5{name}")
    try:
        made(plain, tmp_path / "x.h5", 5)
    except FastpipeError as error:
        assert any(words in str(error) for words in ("move it away", "name another file", "name a file"))
    else:  # an empty folder is one that a job has made
        assert name == ".partial" and (tmp_path / "x.h5").is_file()


def test_repack_uses_no_file_that_is_none(put: Put, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "in.h5", "w") as file:
        file.create_dataset("x", data=np.arange(10))
    put(unfinished_path(tmp_path / "out.h5"))
    code = main(["repack", str(tmp_path / "in.h5"), str(tmp_path / "out.h5"), "--dataset", "x"])
    assert code == 2 or (tmp_path / "out.h5").is_file()


@pytest.mark.parametrize("name", ["locks", "objects", "tables", "writing"])
def test_a_stage_uses_no_file_that_is_none(put: Put, tmp_path: Path, name: str) -> None:
    (tmp_path / "fastpipe-stage").mkdir(0o700)
    put(tmp_path / "fastpipe-stage" / name)
    photo(tmp_path / "data")
    try:
        dataset = FastImageFolder(tmp_path / "data", PILToTensor(), stage=tmp_path)
    except StageError as error:
        assert name == "locks" and "Name a folder of your own" in str(error)
    else:
        assert dataset[0][0].shape == (3, 9, 9)
        dataset.close()


def test_a_report_is_written_to_a_fifo_that_has_a_reader(tmp_path: Path) -> None:
    path, command = fifo(tmp_path / "report.html"), ["scan", str(photo(tmp_path / "data")), "--json"]
    assert main([*command, str(path)]) == 2
    with pytest.raises(OSError, match="fifo or socket that nobody reads"):
        open_output(path)
    (tmp_path / "bad" / "a").mkdir(parents=True)
    (tmp_path / "bad" / "a" / "x.jpg").write_bytes(b"no image")
    dataset = FastImageFolder(tmp_path / "bad", PILToTensor(), bad_samples=BadSamples("skip", log=path))
    with pytest.raises(OSError, match="fifo or socket that nobody reads"):
        list(FastLoader(dataset, batch_size=1))
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # as of a shell's >(...)
    try:
        assert main([*command, str(path)]) == 0
        assert b'"all 1 images can be read"' in os.read(reader, 1 << 16)
    finally:
        os.close(reader)
    write_whole(path, lambda file: file.write(b"whole"))
    assert path.read_bytes() == b"whole"


def test_trees_are_removed_without_waiting(put: Put, tmp_path: Path) -> None:
    put(tmp_path / "x")
    remove_tree(tmp_path / "x")
    remove_tree(tmp_path / "x")
    assert not os.path.lexists(tmp_path / "x")
