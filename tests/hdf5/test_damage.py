"""Chunks whose bytes were changed, cut off or added to: what is read is what h5py reads, or is declined and then
said to be damaged; and nothing else of the file suffers.

There are damages that the HDF5 library does not see and that are errors here: a chunk whose filters make more or
fewer bytes of it than it has.  Of more the library drops the rest, and of fewer it gives the rest of the memory
as it was.  Its plugins may also end the process, so it reads in another one.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import subprocess
import sys
import tempfile
import zlib
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hdf5_kit import COMPRESSORS, layout_of, read, read_alone, read_natively, reader_of, stored, write
from hypothesis import event, given, settings
from hypothesis import strategies as st

from fastpipe.core.native import native
from fastpipe.core.reads import ChunkError
from fastpipe.errors import HDF5Error
from fastpipe.hdf5.chunks import ChunkReader, FileState
from fastpipe.hdf5.files import SampleFiles
from fastpipe.hdf5.filters import described
from fastpipe.hdf5.layout import read_layout
from fastpipe.hdf5.opening import DamagedError
from fastpipe.hdf5.reader import RowReader

ROWS, IN_CHUNK = 12, 4
MIDDLE = slice(IN_CHUNK, 2 * IN_CHUNK)  # rows of the chunk that is damaged


def case_of(
    compressor: Any, side: int = 400, filters: Any = ("compressor",), **others: Any
) -> dict[str, Any]:
    return {
        "shape": (ROWS, side), "chunk": (IN_CHUNK, side), "dtype": "<i4", "filters": filters, "compressor": compressor,
        "kind": "chunked", "fill": False, "written": "all", "masked": False, "libver": "latest", "userblock": 0,
        "grows": False, "values": "few", "seed": 3,
    } | others  # fmt: skip


@st.composite
def damages(draw: Any) -> dict[str, Any]:
    filters = draw(st.sampled_from([(), (), ("shuffle",), ("fletcher32",)])), ("compressor",)
    return case_of(
        draw(st.sampled_from(COMPRESSORS)), draw(st.integers(1, 600)),
        [*filters[0], *filters[1], *draw(st.sampled_from([(), (), ("fletcher32",), ("shuffle",)]))],
        dtype=draw(st.sampled_from(["u1", "<i2", ">f4", "<f8"])), seed=draw(st.integers(0, 99)),
        values=draw(st.sampled_from(["noise", "few", "zeros"])),
        damage=draw(st.sampled_from(["flip", "flip", "range", "numbers", "cut", "longer"])),
        places=draw(st.lists(st.integers(0, 1 << 16), min_size=1, max_size=3)), bits=draw(st.integers(1, 255)),
        number=draw(st.sampled_from([0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF])),
    )  # fmt: skip


def written(path: Path, case: dict[str, Any]) -> Any:
    """Writes the file, and returns what is in it; None where the library cannot read it."""
    write(path, case)
    with h5py.File(path, "r") as file:
        try:
            return file["x"][...]
        except OSError:
            return None


def damage(path: Path, case: dict[str, Any]) -> None:
    how, places = case["damage"], case["places"]
    with h5py.File(path, "r+") as file:
        dataset = file["x"].id
        info = dataset.get_chunk_info_by_coord((IN_CHUNK, 0))
        mask, stored = dataset.read_direct_chunk((IN_CHUNK, 0))
        raw, random = bytearray(stored), np.random.default_rng(case["seed"])
        if how == "cut":
            del raw[max(1, places[0] % len(raw)) :]
        elif how == "longer" and dataset.get_create_plist().get_nfilters():  # else it reaches into the next
            raw += random.integers(0, 256, 1 + places[0] % 50, np.uint8).tobytes()
        if len(raw) != len(stored):
            dataset.write_direct_chunk((IN_CHUNK, 0), bytes(raw), mask)
            return
    for number, place in enumerate(places):
        # Half of them at the beginning, where headers are.
        at = place % (len(raw) if number else min(len(raw), 40))
        if how == "flip":
            raw[at] ^= case["bits"]
        elif how == "range":
            end = min(len(raw), at + 1 + place % 77)
            raw[at:end] = random.integers(0, 256, end - at, np.uint8).tobytes()
        else:
            order = "big" if place % 2 else "little"
            raw[at : at + 4] = case["number"].to_bytes(4, order)[: len(raw) - at]
    with open(path, "r+b") as file:
        file.seek(info.byte_offset)
        file.write(raw)


def read_by_h5py(path: Path) -> bytes | None:
    """The chunk in the middle, read in a process of its own, which plugins may end."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        faulthandler.disable()  # such an end is expected, and its traceback would hide those of failures
        with suppress(BaseException), h5py.File(path) as file:
            os.write(writing, file["x"][MIDDLE].tobytes())
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        found = pipe.read()
    os.waitpid(child, 0)
    return found or None


def check(case: dict[str, Any]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.h5"
        data = written(path, case)
        if data is None:
            return "h5py cannot read what it wrote"
        damage(path, case)
        with h5py.File(path, "r") as file:
            layout = read_layout(file["x"])
        if layout.kind == "h5py":
            assert "twice" in layout.why
            return layout.why
        reader, is_other, found = reader_of(path, layout=layout, threads=2), np.ones(ROWS, bool), []
        is_other[MIDDLE] = False
        for before, threads in ((0xAB, 0), (0x54, 2)):
            rows = read_natively(reader, np.arange(ROWS), before, threads)
            assert rows.is_made[is_other].all()
            assert rows.arrays[0][is_other].tobytes() == data[is_other].tobytes()
            assert len(set(rows.is_made[MIDDLE].tolist())) == 1
            found.append(rows.arrays[0][MIDDLE].tobytes() if rows.is_made.all() else None)
        ours = found[0]
        assert found == [ours, ours]
        alone, why = None, ""
        try:
            alone = read_alone(reader, range(MIDDLE.start, MIDDLE.stop)).tobytes()
        except DamagedError as error:
            why = str(error)
            assert f"x.h5, dataset /x, chunk 1 at [4:8, 0:{case['shape'][1]}]: " in why
        assert ours is None or alone == ours
        chunks = ChunkReader(layout, FileState.of(path.stat()))
        out = np.full((3, chunks.nbytes), 0x3C, np.uint8)
        with pytest.raises(ChunkError, match=r"chunk 1 at \[4:8, 0:") if alone is None else nullcontext():
            chunks.decode(np.arange(3), out)
            assert out[1].tobytes() == alone
        theirs = read_by_h5py(path)
        if theirs is not None and alone is not None:
            assert alone == theirs
        if theirs is not None and alone is None:
            reasons = ("expected", "end too early", "more than the", "header is cut off", "impossible size")
            assert any(reason in why for reason in reasons), why
        # A sample of blocks that are whole needs no others.
        nbytes = data[0].nbytes
        for number, row in enumerate(range(MIDDLE.start, MIDDLE.stop)):
            one = read_natively(reader, [row])
            if one.is_made[0] and alone is not None:
                assert one.arrays[0].tobytes() == alone[number * nbytes :][:nbytes]
            assert one.is_made[0] or alone is None or ours is None
        said = ["read" if value is not None else "refused" for value in (alone, theirs)]
        return f"{said[0]}, {said[1]} by h5py"


@settings(max_examples=120)
@given(case=damages())
def test_damage_is_an_error_or_read_as_h5py_reads_it(case: dict[str, Any]) -> None:
    event(check(case))


@pytest.mark.slow
@settings(max_examples=20_000, derandomize=False)
@given(case=damages())
def test_much_damage_is_an_error_or_read_as_h5py_reads_it(case: dict[str, Any]) -> None:
    check(case)


@pytest.mark.few(12)
@pytest.mark.parametrize("compressor", COMPRESSORS[1:], ids=str)
def test_bytes_that_are_no_chunk_are_declined_and_named(compressor: Any, tmp_path: Path) -> None:
    """Each length of what one filter stored, in memory of exactly that size; and bytes of no filter at all."""
    path, data, mask = tmp_path / "x.h5", None, 1
    for values in ("few", "zeros"):
        if mask:  # it was left out of the chunk, as it gained nothing
            data = written(path, case_of(compressor, values=values))
        with h5py.File(path) as file:
            (step,) = read_layout(file["x"]).filters
            mask, stored = file["x"].id.read_direct_chunk((IN_CHUNK, 0))
    with h5py.File(path, "r+") as file:
        file["x"].id.write_direct_chunk((IN_CHUNK, 0), b"\xfe" * 1000)
    nbytes = IN_CHUNK * 400 * 4
    assert not isinstance(native.undo_filter(described(step), stored, nbytes), int)
    for length in range(len(stored)):
        assert isinstance(native.undo_filter(described(step), stored[:length], nbytes), int)
    reader = reader_of(path)
    rows = read_natively(reader, np.arange(ROWS))
    assert np.flatnonzero(~rows.is_made).tolist() == [4, 5, 6, 7]
    assert rows.statuses[4, :2].tolist() == [2, 6]  # declined: damaged
    spoken = {
        1: "gzip", 32000: "lzf", 32001: "blosc", 32004: "lz4", 32008: "bitshuffle", 32015: "zstd", 32026: "blosc2",
    }  # fmt: skip
    said = rf"x\.h5, dataset /x, chunk 1 at \[4:8, 0:400\]: {spoken[step.code]}: "
    with pytest.raises(DamagedError, match=said):
        read(reader, [5])
    np.testing.assert_array_equal(read(reader, [0, 11]), data[[0, 11]])


STRIPES = np.arange(240).reshape(60, 4).astype("<i4")


@pytest.mark.parametrize(
    ("made", "why"), [(31, "gzip: .*31 bytes"), *((n, "gzip: .*more than the 32 bytes") for n in (33, 1000, 1 << 20))]
)  # fmt: skip
def test_a_chunk_of_another_size_is_named_and_the_others_are_read(
    tmp_path: Path, made: int, why: str
) -> None:
    path, which = stored(tmp_path / "x.h5", STRIPES, chunks=(2, 4), compression="gzip", shuffle=True), 13
    layout = layout_of(path)
    with open(path, "ab") as raw:
        layout.offsets[which], layout.sizes[which] = raw.tell(), raw.write(zlib.compress(bytes(made)))
    others = [row for row in range(60) if row // 2 != which]
    reader = reader_of(path, layout=layout)
    rows = read_natively(reader, np.arange(60))
    assert np.flatnonzero(rows.is_made).tolist() == others
    np.testing.assert_array_equal(rows.arrays[0][others], STRIPES[others])
    with pytest.raises(DamagedError, match=rf"x\.h5, dataset /x, chunk {which} at \[26:28, 0:4\]: {why}"):
        read(reader, np.arange(60))
    chunks = ChunkReader(layout, FileState.of(path.stat()))
    out = np.zeros((30, chunks.nbytes), np.uint8)
    with pytest.raises(ChunkError, match=rf"x\.h5, dataset /x, chunk {which} at .*: {why}"):
        chunks.decode(np.arange(30), out)
    np.testing.assert_array_equal(out[:which].view("i4").reshape(-1, 4), STRIPES[: 2 * which])


@pytest.mark.parametrize("options", [{}, {"compression": "gzip"}, {"chunks": None}])
def test_a_file_that_ends_within_the_data_is_damaged(tmp_path: Path, options: Any) -> None:
    path = stored(tmp_path / "x.h5", STRIPES, **{"chunks": (30, 4), **options})
    layout = layout_of(path)
    os.truncate(path, int(layout.offsets[-1]) + 50)
    with pytest.raises(DamagedError, match=r"x\.h5, dataset /x.*: the file ends within it"):
        read(reader_of(path, layout=layout), [0, 59])


@pytest.mark.parametrize("size", [1 << 40, 1 << 62, (1 << 63) - 1, (1 << 63) - 64])
def test_a_chunk_that_is_larger_than_the_file_is_damaged(tmp_path: Path, size: int) -> None:
    path = stored(tmp_path / "x.h5", STRIPES[:12], chunks=(4, 4), compression="gzip")
    layout = layout_of(path)
    layout.sizes[1] = size
    reader = reader_of(path, layout=layout)
    assert not read_natively(reader, np.arange(4, 8)).is_made.any()
    with pytest.raises(DamagedError, match=r"chunk 1 at \[4:8, 0:4\]: "):
        read(reader, [5])


@pytest.mark.parametrize("offset", [1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 64, (1 << 64) - 2])
@pytest.mark.parametrize("options", [{}, {"compression": "gzip"}, {"chunks": None}])
def test_an_address_in_the_file_that_leads_nowhere_is_damage(
    tmp_path: Path, offset: int, options: dict[str, Any]
) -> None:
    data = STRIPES[:12]
    path = stored(tmp_path / "x.h5", data, libver="earliest", **{"chunks": (4, 4), **options})
    layout, raw = layout_of(path), path.read_bytes()
    behind = b"" if layout.kind == "chunked" else data.nbytes.to_bytes(8, "little")
    own = int(layout.offsets[-1]).to_bytes(8, "little") + behind
    assert raw.count(own) == 1
    path.write_bytes(raw.replace(own, offset.to_bytes(8, "little") + behind))
    try:
        files = SampleFiles([path], ["x"])
    except HDF5Error as error:  # the library sees that a dataset as a whole is not there
        assert "x.h5: 'x' cannot be opened, it may be damaged: " in str(error)
        assert layout.kind == "contiguous"
        return
    with pytest.raises(DamagedError, match=r"x\.h5, dataset /x.*: the file ends within it"):
        read(RowReader(files), [11])
    if layout.kind == "chunked":
        np.testing.assert_array_equal(read(RowReader(files), [7, 0]), data[[7, 0]])


def changed_files(folder: Path, seed: int, count: int) -> Any:
    command = [sys.executable, Path(__file__).with_name("mutation_script.py"), folder, str(seed), str(count)]
    run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
    return json.loads(run.stdout)


@pytest.mark.slow
def test_changed_files_are_read_as_h5py_reads_them(tmp_path: Path) -> None:
    assert changed_files(tmp_path, 1, 20) == []


@pytest.mark.slow
def test_many_changed_files_are_read_as_h5py_reads_them(tmp_path: Path) -> None:
    seed = int(os.environ.get("FASTPIPE_SEED", random.SystemRandom().randrange(1 << 30)))
    assert changed_files(tmp_path, seed, 3000) == [], f"FASTPIPE_SEED={seed} makes these files again"
