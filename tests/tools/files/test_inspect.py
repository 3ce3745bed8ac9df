"""The facts about datasets of every kind, the advice, and the command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import numpy as np
import pytest

from fastpipe.cli import main
from fastpipe.hdf5.filters import FilterStep, in_words
from fastpipe.hdf5.inspect import DatasetFacts, advise, inspect_file

Make = Callable[[Any], object]
MIB = 1 << 20
NOISE = np.random.default_rng(0).integers(0, 9, (1024, 4096), np.uint8)


def facts_of(path: Path, make: Make, sample_dims: int = 1, batch_size: int = 256) -> DatasetFacts:
    """The facts about a file's only dataset."""
    with h5py.File(path / "x.h5", "w") as file:
        make(file)
    (facts,) = inspect_file(path / "x.h5", sample_dims, batch_size)
    return facts


def kinds(facts: DatasetFacts, free_memory: int | None = None) -> list[str]:
    return [one.kind for one in advise([facts], "x.h5", 256, free_memory)]


def test_a_chunked_dataset(tmp_path: Path) -> None:
    facts = facts_of(
        tmp_path,
        lambda file: file.create_dataset(
            "g/x", data=NOISE[:100].view("<i2"), chunks=(16, 1024), compression="gzip", shuffle=True
        ),
    )
    assert (facts.path, facts.shape, facts.dtype, facts.storage) == ("/g/x", (100, 2048), "int16", "chunked")
    assert (facts.chunk, facts.filters, facts.codes) == ((16, 1024), ("shuffle", "gzip 4"), (2, 1))
    assert facts.decoded == 100 * 4096 and 0 < facts.stored < facts.decoded
    assert (facts.samples, facts.sample_nbytes, facts.samples_per_chunk) == (100, 4096, 16)
    assert (facts.chunks, facts.chunk_nbytes, facts.parts) == (14, 16 * 2048, 2)
    assert (facts.reader, facts.why, facts.missing) == ("threads", "", ())
    assert facts.epoch is not None
    assert facts.epoch.windowed_nbytes == 7 * 2 * 16 * 2048
    assert facts.epoch.nbytes == round(facts.epoch.decodes * facts.epoch.windowed_nbytes)
    assert facts.epoch.decodes == pytest.approx(1)  # one batch has them all


def test_without_filters_samples_are_read_by_themselves(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, lambda file: file.create_dataset("x", data=NOISE, chunks=(16, 4096)))
    assert facts.epoch is not None
    assert (facts.epoch.decodes, facts.epoch.nbytes, facts.epoch.reads) == (1.0, 4 * MIB, 1)
    facts = facts_of(
        tmp_path, lambda file: file.create_dataset("x", data=NOISE.reshape(1024, 64, 64), chunks=(16, 64, 16))
    )
    assert facts.epoch is not None and facts.epoch.reads == 4 * 64


def test_more_dimensions_that_count_samples(tmp_path: Path) -> None:
    def make(file: Any) -> None:
        file.create_dataset("x", data=NOISE.reshape(32, 32, 4096), chunks=(4, 8, 4096), compression="lzf")

    facts = facts_of(tmp_path, make, sample_dims=2)
    assert (facts.samples, facts.sample_nbytes, facts.samples_per_chunk) == (1024, 4096, 32)
    facts = facts_of(tmp_path, make, sample_dims=4)
    assert (facts.samples, facts.epoch, facts.chunks) == (None, None, 32)


def _external(file: Any) -> None:
    file.create_dataset("x", (10,), "i4", external=[("elsewhere.bin", 0, 40)])


def _virtual(file: Any) -> None:
    layout = h5py.VirtualLayout((10,), "i4")
    layout[:] = h5py.VirtualSource("elsewhere.h5", "x", (10,))
    file.create_virtual_dataset("x", layout)


def _compact(file: Any) -> None:
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_layout(h5py.h5d.COMPACT)
    space = h5py.h5s.create_simple((10,))
    h5py.h5d.create(file.id, b"x", h5py.h5t.NATIVE_INT32, space, properties)


TABLE = np.dtype([("id", "<i4"), ("name", h5py.string_dtype())])


@pytest.mark.parametrize(
    ("make", "shape", "storage", "dtype", "decoded", "reader", "why"),
    [
        (lambda f: f.create_dataset("x", (10,), "i4"), (10,), "contiguous", "int32", 40, "threads", ""),
        (_compact, (10,), "compact", "int32", 40, "threads", ""),
        (_virtual, (10,), "virtual", "int32", 40, "h5py", "virtual"),
        (_external, (10,), "external", "int32", 40, "h5py", "external files"),
        (lambda f: f.create_dataset("x", data=5), (), "contiguous", "int64", 8, "", ""),
        (lambda f: f.create_dataset("x", data=h5py.Empty("f4")), None, "none", "float32", None, "", ""),
        (lambda f: f.create_dataset("x", (0, 3), ">f4"), (0, 3), "contiguous", ">f4", 0, "threads", ""),
        (lambda f: f.create_dataset("x", data=["a", "bc"]), (2,), "contiguous", "string", None, "h5py", "no fixed size"),
        (lambda f: f.create_dataset("x", data=np.array([b"abc"])), (1,), "contiguous", "string of 3 bytes", 3, "threads", ""),
        (lambda f: f.create_dataset("x", (2,), TABLE), (2,), "contiguous", "(id: int32, name: string)", None, "h5py", "no fixed size"),
        (lambda f: f.create_dataset("x", (2,), "?"), (2,), "contiguous", "bool", 2, "threads", ""),
        (lambda f: f.create_dataset("x", (2,), h5py.vlen_dtype("u1")), (2,), "contiguous", "lists of uint8", None, "h5py", "no fixed size"),
        (lambda f: f.create_dataset("x", (2,), h5py.ref_dtype), (2,), "contiguous", "object reference", None, "h5py", "no fixed size"),
        (lambda f: f.create_dataset("x", (2,), h5py.enum_dtype({"A": 1}, "i1")), (2,), "contiguous", "enum of int8", 2, "threads", ""),
    ],
)  # fmt: skip
def test_datasets_of_every_kind(
    tmp_path: Path, make: Make, shape: Any, storage: str, dtype: str, decoded: Any, reader: str, why: str
) -> None:
    facts = facts_of(tmp_path, make)
    assert (facts.shape, facts.storage, facts.dtype, facts.decoded) == (shape, storage, dtype, decoded)
    assert facts.reader == reader
    assert why in facts.why and bool(why) == bool(facts.why)
    assert facts.chunk is None and facts.samples_per_chunk is None


def test_what_is_stored_in_odd_ways(odd_hdf5: Path) -> None:
    by_library = {facts.path for facts in inspect_file(odd_hdf5, 1, 4) if facts.reader == "h5py"}
    assert by_library == {"/never filled", "/undefined fill", "/grows across"}


def test_every_dataset_once_and_no_other_file(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["there"] = np.arange(5)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["b/c/d"], file["a"] = np.arange(5), np.arange(6)
        file["b/same"], file["soft"] = file["a"], h5py.SoftLink("/a")
        file["gone"] = h5py.SoftLink("/nothing")
        file["outside"] = h5py.ExternalLink("other.h5", "/there")
        file["b/up"] = file["/"]
    assert [facts.path for facts in inspect_file(tmp_path / "x.h5", 1, 256)] == ["/a", "/b/c/d"]


@pytest.mark.parametrize(
    ("code", "values", "words"),
    [
        (2, (4,), "shuffle"), (1, (9,), "gzip 9"), (32000, (), "lzf"), (32015, (3,), "zstd 3"), (6, (), "scale-offset"),
        (32001, (2, 2, 4, 64, 5, 0, 5), "blosc zstd 5"), (32001, (2, 2, 4, 64, 5, 2, 9), "blosc codec 9 5, its bitshuffle"),
        (32008, (0, 4, 4, 0, 2), "bitshuffle with lz4"), (32008, (), "bitshuffle"), (512, (), "mine"),
    ],
)  # fmt: skip
def test_filters_in_words(code: int, values: tuple[int, ...], words: str) -> None:
    assert in_words(FilterStep(code, values, "mine")) == words


def _made(**options: Any) -> Make:
    data = options.pop("data", NOISE)
    return lambda file: file.create_dataset("x", data=data, **options)


# 4 MiB each; the batches of 256 are a quarter of the samples.
@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (_made(), []),
        (_made(chunks=(16, 4096)), []),
        (_made(chunks=(4, 4096), compression="lzf"), ["decoded often"]),
        (_made(chunks=(4, 4096), compression="gzip"), ["decoded often", "slow codec"]),
        (_made(chunks=(4, 4096), **hdf5plugin.Zstd()), ["decoded often"]),
        (_made(chunks=(1, 4096), compression="lzf"), ["tiny chunks"]),
        (_made(data=NOISE.reshape(64, 65536), chunks=(1, 65536), compression="lzf"), []),
        (_made(data=NOISE.reshape(64, 65536), chunks=(1, 65536), compression="gzip"), ["slow codec"]),
        (_made(data=NOISE.reshape(64, 65536), chunks=(1, 512), compression="lzf"), ["cut samples", "tiny chunks"]),
        (_made(data=NOISE.reshape(64, 65536), chunks=(64, 512)), ["cut samples"]),
        (_made(data=NOISE.reshape(64, 65536), chunks=(64, 32768)), []),
        (_made(chunks=(4, 4096), scaleoffset=4), ["through h5py", "decoded often"]),
        (_made(data=NOISE[:9], chunks=(9, 16), compression="gzip"), []),
        (lambda file: file.create_dataset("x", (0, 3)), ["empty"]),
        (_made(data=5), []),
        (_made(data=["a"] * 99), []),
        (_made(data=["a"] * 99999), ["through h5py"]),
        (_virtual, []),
    ],
)  # fmt: skip
def test_which_advice(tmp_path: Path, make: Make, expected: list[str]) -> None:
    assert kinds(facts_of(tmp_path, make)) == expected


def test_advice_where_the_library_is_needed_for_chunks(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w", libver="latest") as file:
        file.create_dataset("a", (1024, 1024), "f4", chunks=(64, 64), fill_time="never")
        file.create_dataset("b", data=np.ones((1024, 1024)), chunks=(64, 64), maxshape=(1024, None))
    advice = advise(inspect_file(tmp_path / "x.h5", 1, 256), "x.h5", 256, None)
    remedies = {one.dataset: one.remedies for one in advice if one.kind == "through h5py"}
    assert "fastpipe repack" in remedies["/a"][0] and "--codec keep" in remedies["/a"][0]
    assert "without libver=" in remedies["/b"][0]


def test_huge_chunks(tmp_path: Path) -> None:
    def make(file: Any) -> None:
        file.create_dataset("x", (4096, 4096), "u1", chunks=(4096, 4096), compression="lzf")

    huge, often = sorted(
        advise([facts_of(tmp_path, make)], "x.h5", 256, None), key=lambda one: -len(one.kind)
    )
    assert (huge.kind, often.kind) == ("decoded often", "huge chunks")
    assert "its chunks are 16 MiB, of which a sample needs 4 KiB" in often.text


def test_decoded_often_with_all_remedies(tmp_path: Path) -> None:
    facts = facts_of(
        tmp_path,
        _made(data=NOISE.reshape(128, 32768), chunks=(16, 32768), compression="lzf"),
        batch_size=4,
    )
    assert facts.epoch is not None
    (one,) = advise([facts], "my file.h5", 4, 100 * MIB)
    assert one.text == (
        f"16 samples are compressed together in a chunk of 512 KiB: an epoch in uniform order, in batches of 4, "
        f"decodes each chunk {facts.epoch.decodes:.3g} times, {facts.epoch.decodes * 4:.3g} MiB instead of 4 MiB"
    )
    assert one.remedies == (
        'Shuffle(window=64, unit="group"), which decodes each chunk once and takes 4 MiB',
        'cache="ram": decoded the data are 4 MiB, and 100 MiB of memory are free',
        "fastpipe repack 'my file.h5' OUT --dataset /x --chunk-rows 1",
    )
    for free in (None, 7 * MIB):
        (one,) = advise([facts], "x.h5", 4, free)
        assert not any("cache=" in remedy for remedy in one.remedies)


def test_samples_that_are_too_small_for_chunks_of_their_own(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, _made(chunks=(64, 4096), compression="lzf"))
    (one,) = advise([facts], "x.h5", 256, None)
    assert one.remedies[-1] == "fastpipe repack x.h5 OUT --dataset /x --codec none"


def test_a_filter_that_is_missing(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", data=NOISE[:9], chunks=(9, 16), **hdf5plugin.BZip2())
        file.create_dataset("y", data=NOISE[:9], chunks=(9, 4096), **hdf5plugin.Zstd())
    code = "import sys; sys.modules['hdf5plugin'] = None; from fastpipe.cli import main; sys.exit(main())"
    # netCDF4, once imported, tells its child processes of other plugins.
    environment = {name: value for name, value in os.environ.items() if name != "HDF5_PLUGIN_PATH"}
    for before, expected in (("", []), (code, ["bzip2"])):
        command = [sys.executable, *(["-c", before] if before else ["-m", "fastpipe"])]
        done = subprocess.run(
            [*command, "inspect", "--json", str(tmp_path / "x.h5")],
            capture_output=True,
            text=True,
            check=True,
            env=environment,
        )
        found = json.loads(done.stdout)
        assert [facts["missing"] for facts in found["datasets"]] == [expected, []]
        said = [(one["dataset"], one["kind"]) for one in found["advice"]]
        assert said == ([("/x", "missing plugin")] if expected else [])
        assert all("pip install hdf5plugin" in one["remedies"][0] for one in found["advice"])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("images", data=NOISE, chunks=(16, 4096), compression="gzip", compression_opts=9)
        file["labels [red]"] = np.arange(1024)
        file["names"] = ["a"] * 1024
    return tmp_path / "x.h5"


def test_the_tables(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(path)]) == 0
    out = capsys.readouterr().out
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line.strip()}
    assert f"{path}: 3 datasets" in out
    assert "labels [red]" in out
    assert "16 × 4096" in out and "gzip 9" in out
    assert "/names is read through h5py: its elements have no fixed size" in out
    assert "what an epoch reads, in batches of 256, where decoded chunks are not kept" in out
    assert "/images: 16 samples are compressed together in a chunk of 64 KiB" in out
    assert rows["-"][-1] == "hdf5plugin)"
    assert "Nothing to advise" not in out


def test_json(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(path), "--json", "--batch-size", "64"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["schema"], found["file"], found["batch_size"], found["sample_dims"]) == (
        1,
        str(path),
        64,
        1,
    )
    images = found["datasets"][0]
    assert (images["path"], images["chunk"], images["filters"]) == ("/images", [16, 4096], ["gzip 9"])
    assert 8 < images["epoch"]["decodes"] < 16
    assert [one["kind"] for one in found["advice"]] == ["decoded often", "slow codec"]


def test_nothing_to_advise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["large"], file["small"] = NOISE, 5
    assert main(["inspect", str(tmp_path / "x.h5")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2] == "Nothing to advise."
    assert lines[-1].startswith("/large is contiguous, which is ideal")
    with h5py.File(tmp_path / "x.h5", "w"):
        pass
    assert main(["inspect", str(tmp_path / "x.h5")]) == 0
    assert "0 datasets" in capsys.readouterr().out


def test_files_that_cannot_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").write_text("text")
    for name, said in (("none", "No such file"), ("text", "is no HDF5 file")):
        assert main(["inspect", str(tmp_path / name)]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        (line,) = captured.err.splitlines()
        assert line.startswith("fastpipe inspect: ") and said in line


@pytest.mark.parametrize("options", [["--batch-size", "0"], ["--sample-dims", "x"]])
def test_wrong_options(path: Path, options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["inspect", str(path), *options])
    assert stopped.value.code == 2
    assert "must be a whole number from 1" in capsys.readouterr().err
