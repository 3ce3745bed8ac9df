"""``fastpipe inspect`` of HDF5 files: facts about datasets of every kind, and advice."""

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

from fastpipe.hdf5.inspect import DatasetFacts, advise, inspect_file

Make = Callable[[Any], object]
MIB = 1 << 20
NOISE = np.random.default_rng(0).integers(0, 9, (1024, 4096), np.uint8)
WIDE = NOISE.reshape(64, 65536)
TABLE = np.dtype([("id", "<i4"), ("name", h5py.string_dtype())])


def facts_of(path: Path, make: Make, sample_dims: int = 1, batch_size: int = 256) -> DatasetFacts:
    """The facts about a file's only dataset."""
    with h5py.File(path / "x.h5", "w") as file:
        make(file)
    (facts,) = inspect_file(path / "x.h5", sample_dims, batch_size)
    return facts


def made(data: Any = NOISE, **options: Any) -> Make:
    return lambda file: file.create_dataset("x", data=data, **options)


def test_facts_of_a_chunked_dataset(tmp_path: Path) -> None:
    data = NOISE[:100].view("<i2")
    facts = facts_of(tmp_path, made(data, chunks=(16, 1024), compression="gzip", shuffle=True))
    assert (facts.path, facts.shape, facts.dtype, facts.storage) == ("/x", (100, 2048), "int16", "chunked")
    assert (facts.chunk, facts.filters, facts.codes) == ((16, 1024), ("shuffle", "gzip 4"), (2, 1))
    assert facts.decoded == 100 * 4096 and 0 < facts.stored < facts.decoded
    assert (facts.samples, facts.sample_nbytes, facts.samples_per_chunk) == (100, 4096, 16)
    assert (facts.chunks, facts.chunk_nbytes, facts.parts) == (14, 16 * 2048, 2)
    assert (facts.reader, facts.why, facts.missing) == ("threads", "", ())
    assert facts.epoch is not None and facts.epoch.windowed_nbytes == 7 * 2 * 16 * 2048
    assert facts.epoch.nbytes == round(facts.epoch.decodes * facts.epoch.windowed_nbytes)
    assert facts.epoch.decodes == pytest.approx(1)  # one batch has them all
    facts = facts_of(tmp_path, made(NOISE.reshape(32, 32, 4096), chunks=(4, 8, 4096), compression="lzf"), 2)
    assert (facts.samples, facts.sample_nbytes, facts.samples_per_chunk) == (1024, 4096, 32)
    (facts,) = inspect_file(tmp_path / "x.h5", 4, 256)  # more dimensions than it has
    assert (facts.samples, facts.epoch, facts.chunks) == (None, None, 32)
    for options, words in (
        (hdf5plugin.Blosc("zstd", 5, 2), "blosc zstd 5, its bitshuffle"),
        (hdf5plugin.Bitshuffle(), "bitshuffle with lz4"),
    ):
        assert facts_of(tmp_path, made(chunks=(16, 4096), **options)).filters == (words,)
    epoch = facts_of(tmp_path, made(chunks=(16, 4096))).epoch  # without filters samples are read one by one
    assert epoch is not None and (epoch.decodes, epoch.nbytes, epoch.reads) == (1.0, 4 * MIB, 1)
    epoch = facts_of(tmp_path, made(NOISE.reshape(1024, 64, 64), chunks=(16, 64, 16))).epoch
    assert epoch is not None and epoch.reads == 4 * 64


def external(file: Any) -> None:
    file.create_dataset("x", (10,), "i4", external=[("elsewhere.bin", 0, 40)])


def virtual(file: Any) -> None:
    layout = h5py.VirtualLayout((10,), "i4")
    layout[:] = h5py.VirtualSource("elsewhere.h5", "x", (10,))
    file.create_virtual_dataset("x", layout)


def compact(file: Any) -> None:
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_layout(h5py.h5d.COMPACT)
    h5py.h5d.create(file.id, b"x", h5py.h5t.NATIVE_INT32, h5py.h5s.create_simple((10,)), properties)


def empty(dtype: Any, shape: Any = (2,)) -> Make:
    return lambda file: file.create_dataset("x", shape, dtype)


@pytest.mark.parametrize(
    ("make", "shape", "storage", "dtype", "decoded", "reader", "why"),
    [
        (empty("i4", (10,)), (10,), "contiguous", "int32", 40, "threads", ""),
        (compact, (10,), "compact", "int32", 40, "threads", ""),
        (virtual, (10,), "virtual", "int32", 40, "h5py", "virtual"),
        (external, (10,), "external", "int32", 40, "h5py", "external files"),
        (made(5), (), "contiguous", "int64", 8, "", ""),
        (made(h5py.Empty("f4")), None, "none", "float32", None, "", ""),
        (empty(">f4", (0, 3)), (0, 3), "contiguous", ">f4", 0, "threads", ""),
        (made(["a", "bc"]), (2,), "contiguous", "string", None, "h5py", "no fixed size"),
        (made(np.array([b"abc"])), (1,), "contiguous", "string of 3 bytes", 3, "threads", ""),
        (empty(TABLE), (2,), "contiguous", "(id: int32, name: string)", None, "h5py", "no fixed size"),
        (empty("?"), (2,), "contiguous", "bool", 2, "threads", ""),
        (empty(h5py.vlen_dtype("u1")), (2,), "contiguous", "lists of uint8", None, "h5py", "no fixed size"),
        (empty(h5py.ref_dtype), (2,), "contiguous", "object reference", None, "h5py", "no fixed size"),
        (empty(h5py.enum_dtype({"A": 1}, "i1")), (2,), "contiguous", "enum of int8", 2, "threads", ""),
    ],
)  # fmt: skip
def test_facts_of_datasets_of_every_kind(
    tmp_path: Path, make: Make, shape: Any, storage: str, dtype: str, decoded: Any, reader: str, why: str
) -> None:
    facts = facts_of(tmp_path, make)
    assert (facts.shape, facts.storage, facts.dtype, facts.decoded) == (shape, storage, dtype, decoded)
    assert facts.reader == reader and why in facts.why and bool(why) == bool(facts.why)
    assert facts.chunk is None and facts.samples_per_chunk is None


def test_odd_datasets_that_only_the_library_reads_are_known(odd_hdf5: Path) -> None:
    by_library = {facts.path for facts in inspect_file(odd_hdf5, 1, 4) if facts.reader == "h5py"}
    assert by_library == {"/never filled", "/undefined fill", "/grows across"}


def test_every_dataset_is_listed_once_and_links_to_other_files_are_not_followed(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["there"] = np.arange(5)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["b/c/d"], file["a"] = np.arange(5), np.arange(6)
        file["b/same"], file["soft"], file["gone"] = file["a"], h5py.SoftLink("/a"), h5py.SoftLink("/nothing")
        file["outside"], file["b/up"] = h5py.ExternalLink("other.h5", "/there"), file["/"]
    assert [facts.path for facts in inspect_file(tmp_path / "x.h5", 1, 256)] == ["/a", "/b/c/d"]


@pytest.mark.parametrize(
    ("make", "kinds"),
    [
        (made(), []),
        (made(chunks=(16, 4096)), []),
        (made(chunks=(4, 4096), compression="lzf"), ["decoded often"]),
        (made(chunks=(4, 4096), compression="gzip"), ["decoded often", "slow codec"]),
        (made(chunks=(4, 4096), **hdf5plugin.Zstd()), ["decoded often"]),
        (made(chunks=(1, 4096), compression="lzf"), ["tiny chunks"]),
        (made(WIDE, chunks=(1, 65536), compression="lzf"), []),
        (made(WIDE, chunks=(1, 65536), compression="gzip"), ["slow codec"]),
        (made(WIDE, chunks=(1, 512), compression="lzf"), ["cut samples", "tiny chunks"]),
        (made(WIDE, chunks=(64, 512)), ["cut samples"]),
        (made(WIDE, chunks=(64, 32768)), []),
        (made(chunks=(4, 4096), scaleoffset=4), ["through h5py", "decoded often"]),
        (made(NOISE[:9], chunks=(9, 16), compression="gzip"), []),
        (empty("f4", (0, 3)), ["empty"]),
        (made(5), []),
        (made(["a"] * 99), []),
        (made(["a"] * 99999), ["through h5py"]),
        (virtual, []),
    ],
)  # fmt: skip
def test_kinds_of_advice(tmp_path: Path, make: Make, kinds: list[str]) -> None:
    assert [one.kind for one in advise([facts_of(tmp_path, make)], "x.h5", 256, None)] == kinds


def test_remedies_are_those_that_help(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w", libver="latest") as file:
        file.create_dataset("a", (1024, 1024), "f4", chunks=(64, 64), fill_time="never")
        file.create_dataset("b", data=np.ones((1024, 1024)), chunks=(64, 64), maxshape=(1024, None))
        file.create_dataset("huge", (4096, 4096), "u1", chunks=(4096, 4096), compression="lzf")
        file.create_dataset("small", data=NOISE, chunks=(64, 4096), compression="lzf")
    advice = advise(inspect_file(tmp_path / "x.h5", 1, 256), "x.h5", 256, None)
    found = {(one.dataset, one.kind): one for one in advice}
    through_h5py = found["/a", "through h5py"].remedies[0]
    assert "fastpipe repack" in through_h5py and "--codec keep" in through_h5py
    assert "without libver=" in found["/b", "through h5py"].remedies[0]
    assert "its chunks are 16 MiB, of which a sample needs 4 KiB" in found["/huge", "huge chunks"].text
    remedy = found["/small", "decoded often"].remedies[
        -1
    ]  # its samples are too small for chunks of their own
    assert remedy == "fastpipe repack x.h5 OUT --dataset /small --codec none"


def test_chunks_that_are_decoded_often_have_three_remedies(tmp_path: Path) -> None:
    make = made(NOISE.reshape(128, 32768), chunks=(16, 32768), compression="lzf")
    facts = facts_of(tmp_path, make, batch_size=4)
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


def test_datasets_that_are_stored_alike_get_advice_once_and_small_parts_get_none(
    tmp_path: Path, inspect: Any
) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        for number in range(25):
            file.create_dataset(
                f"scans/{number}", data=NOISE[: 512 + number], chunks=(64, 4096), compression="lzf"
            )
        file.create_dataset("rest", data=NOISE[:256], chunks=(1, 4096), compression="lzf")  # 1 MiB of 54
    (one,) = advise(inspect_file(tmp_path / "x.h5", 1, 256), "x.h5", 256, 1 << 30)
    assert (one.dataset, one.kind, len(one.others)) == ("/scans/24", "decoded often", 24)
    assert 'cache="ram": decoded the data are 51.2 MiB' in one.remedies[1]
    assert one.remedies[2] == "fastpipe repack x.h5 OUT --codec none"
    out = inspect(tmp_path / "x.h5")[1]
    assert "/scans/24 and 24 datasets like it: 64 samples are" in out
    assert "and 6 datasets more, none of them larger" in out
    assert out.count("\n  /scans/") == 40 and "/rest" not in out  # two tables of 20


def test_chunks_that_are_blocks_are_those_of_a_volume(tmp_path: Path) -> None:
    make = made(NOISE.reshape(64, 256, 256), chunks=(16, 64, 64), compression="gzip")
    (one,) = advise([facts_of(tmp_path, make)], "my file.h5", 256, None)
    assert one.kind == "volume" and one.text == "its chunks (16, 64, 64) are blocks, as those of a volume are"
    assert one.remedies == (
        "for patches: FastPatchDataset('my file.h5/x', …), and fastpipe inspect 'my file.h5/x' --patch 64,64,64",
        "for samples along the first dimension: fastpipe repack 'my file.h5' OUT --dataset /x --chunk-rows auto",
    )


def test_a_missing_plugin_is_named(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", data=NOISE[:9], chunks=(9, 16), **hdf5plugin.BZip2())
        file.create_dataset("y", data=NOISE[:9], chunks=(9, 4096), **hdf5plugin.Zstd())
    code = "import sys; sys.modules['hdf5plugin'] = None; from fastpipe.cli import main; sys.exit(main())"
    # netCDF4, once imported, tells its child processes of other plugins.
    environment = {name: value for name, value in os.environ.items() if name != "HDF5_PLUGIN_PATH"}
    for start, missing in ((["-m", "fastpipe"], []), (["-c", code], ["bzip2"])):
        command = [sys.executable, *start, "inspect", "--json", str(tmp_path / "x.h5")]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        found = json.loads(done.stdout)
        assert [facts["missing"] for facts in found["datasets"]] == [missing, []]
        advice = [(one["dataset"], one["kind"], one["remedies"][0]) for one in found["advice"]]
        assert [one[:2] for one in advice] == [("/x", "missing plugin") for _ in missing]
        assert all("pip install hdf5plugin" in remedy for _, _, remedy in advice)


def test_tables_and_json_have_facts_and_advice_and_what_cannot_be_used_is_refused(
    tmp_path: Path, inspect: Any
) -> None:
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("images", data=NOISE, chunks=(16, 4096), compression="gzip", compression_opts=9)
        file["labels [red]"], file["names"] = np.arange(1024), ["a"] * 1024
    code, out, _ = inspect(path)
    assert code == 0 and f"{path}: 3 datasets" in out and "Nothing to advise" not in out
    for text in (
        "labels [red]", "16 × 4096", "gzip 9", "/names is read through h5py: its elements have no fixed size",
        "what an epoch reads, in batches of 256, where decoded chunks are not kept",
        "/images: 16 samples are compressed together in a chunk of 64 KiB",
    ):  # fmt: skip
        assert text in out
    found = json.loads(inspect(path, "--json", "--batch-size", "64")[1])
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
    (tmp_path / "text").write_text("text")
    for name, message in (("none", "No such file"), ("text", "is not an HDF5 file either")):
        code, out, errors = inspect(tmp_path / name)
        assert (code, out) == (2, "") and errors.startswith("fastpipe inspect: ") and message in errors
    for options in (["--batch-size", "0"], ["--sample-dims", "x"]):
        with pytest.raises(SystemExit) as stopped:
            inspect(path, *options)
        assert stopped.value.code == 2


def test_files_without_faults_or_datasets_get_no_advice(tmp_path: Path, inspect: Any) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["large"], file["small"] = NOISE, 5
    code, out, _ = inspect(tmp_path / "x.h5")
    assert code == 0 and out.splitlines()[-2] == "Nothing to advise."
    assert out.splitlines()[-1].startswith("/large is contiguous, which is ideal")
    h5py.File(tmp_path / "x.h5", "w").close()
    code, out, _ = inspect(tmp_path / "x.h5")
    assert code == 0 and "0 datasets" in out
