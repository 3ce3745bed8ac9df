"""``fastpipe scan`` of an HDF5 file: its verdict on each chunk is the library's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from fastpipe.cli import main

ROWS = np.random.default_rng(0).integers(0, 50, (400, 30), dtype="i4")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Datasets of every kind."""
    with h5py.File(tmp_path / "x.h5", "w") as made:
        made.create_dataset("gzip", data=ROWS, chunks=(16, 30), compression="gzip", shuffle=True)
        made.create_dataset("summed", data=ROWS, chunks=(50, 10), fletcher32=True)
        made.create_dataset("contiguous", data=ROWS)
        made.create_dataset("text", data=[f"text {n}" for n in range(30)], chunks=(10,), compression="gzip")
        made.create_dataset("sparse", (1000,), "i4", chunks=(10,))[:10] = 1
        made.create_dataset("group/scalar", data=3.0)
        made.create_dataset("none", dtype="i4", shape=None)
    return tmp_path / "x.h5"


def scan(file: Path, *more: object) -> tuple[int, dict[str, Any]]:
    report = file.with_suffix(".json")
    code = main(["scan", str(file), "--json", str(report), *map(str, more)])
    found: dict[str, Any] = json.loads(report.read_text())
    return code, found


def spoil(file: Path, name: str, number: int, data: bytes) -> tuple[int, ...]:
    """Write over the beginning of a chunk; returns where in the dataset it is."""
    with h5py.File(file) as opened:
        chunk = opened[name].id.get_chunk_info(number)
    with file.open("r+b") as raw:
        raw.seek(chunk.byte_offset)
        raw.write(data)
    return tuple(map(int, chunk.chunk_offset))


def bad_for_h5py(file: Path) -> set[str]:
    found = set()
    with h5py.File(file) as opened:
        for name in ("gzip", "summed", "text"):
            for box in opened[name].iter_chunks():
                try:
                    opened[name][box]
                except OSError:
                    found.add(f"/{name}[{', '.join(f'{one.start}:{one.stop}' for one in box)}]")
    return found


def test_a_good_file(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = scan(file)
    assert code == 0 and not found["corrupt"] and found["what"] == "chunks"
    assert found["count"] == 25 + 8 * 3 + 1 + 3 + 1 + 1
    assert found["nbytes"] > 3 * ROWS.nbytes
    assert "all 55 chunks can be read" in capsys.readouterr().out


def test_what_is_stored_in_odd_ways_is_good(odd_hdf5: Path) -> None:
    code, found = scan(odd_hdf5)
    assert code == 0 and not found["corrupt"]


def test_chunks_that_are_damaged(file: Path) -> None:
    corners = [spoil(file, "gzip", number, b"\xff" * 20) for number in (3, 17)]
    spoil(file, "summed", 5, b"\1\2\3\4")
    code, found = scan(file, "--threads", 2)
    assert code == 1
    assert {one["path"] for one in found["corrupt"]} == bad_for_h5py(file)
    assert len(found["corrupt"]) == 3
    assert f"/gzip[{corners[0][0]}:{corners[0][0] + 16}, 0:30]" in {one["path"] for one in found["corrupt"]}
    assert all(one["reason"].startswith("OSError") for one in found["corrupt"])


def test_a_file_that_is_cut_off(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with file.open("r+b") as raw:
        raw.truncate(file.stat().st_size // 2)
    assert main(["scan", str(file)]) == 2
    assert "cut off" in capsys.readouterr().err


def test_no_hdf5_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.h5").write_bytes(b"text")
    assert main(["scan", str(tmp_path / "x.h5")]) == 2
    assert "no HDF5 file" in capsys.readouterr().err


@pytest.mark.parametrize("option", [["--fix"], ["--quarantine", "q"]])
def test_parts_of_a_file_are_not_moved(
    option: list[str], file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = shutil.copy(file, file.with_name("copy.h5"))
    assert main(["scan", str(file), *option]) == 2
    assert "folders of images" in capsys.readouterr().err
    assert file.read_bytes() == Path(before).read_bytes()
