"""Arrays that tensorstore reads: N5, and whatever is named by a URL."""

from __future__ import annotations

import functools
import os
import pickle
import tempfile
import threading
from collections.abc import Callable, Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from volume_kit import boxes_equal, random_array, reader_of, same_bits, whole

from fastpipe.errors import VolumeError
from fastpipe.volumes.opening import open_volume
from fastpipe.volumes.tensorstore import TensorStoreVolume
from fastpipe.volumes.volume import DamagedUnitError, GroupedVolume

KINDS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float32", "float64"]
COMPRESSIONS = [
    {"type": "raw"},
    {"type": "gzip", "level": 1},
    {"type": "bzip2"},
    {"type": "xz"},
    {"type": "blosc", "cname": "lz4", "clevel": 3, "shuffle": 1},
]


def write_n5(
    path: Path | str,
    data: Any,
    block: Any,
    compression: dict[str, Any] = COMPRESSIONS[1],
    rows: int | None = None,
) -> Any:
    """An array in N5, of which only some rows are written perhaps."""
    store = tensorstore.open(
        {
            "driver": "n5",
            "kvstore": {"driver": "file", "path": os.fspath(path) + "/"},
            "metadata": {
                "dataType": np.dtype(data.dtype).name, "dimensions": list(data.shape), "blockSize": list(block),
                "compression": compression,
            },
        },
        create=True,
    ).result()  # fmt: skip
    store[: len(data[:rows])].write(data[:rows]).result()
    return store


def tensorstore_of(volume: Any) -> TensorStoreVolume:
    inner = volume.inner if isinstance(volume, GroupedVolume) else volume
    assert isinstance(inner, TensorStoreVolume)
    return inner


@settings(max_examples=40)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 6)), min_size=1, max_size=5), kind=st.sampled_from(KINDS),
    compression=st.sampled_from(COMPRESSIONS), rows=st.integers(1, 9), seed=st.integers(0, 99), slots=st.integers(1, 4),
)  # fmt: skip
def test_any_array_in_n5_is_as_it_was_written(
    sizes: list[tuple[int, int]],
    kind: str,
    compression: dict[str, Any],
    rows: int,
    seed: int,
    slots: int,
    memory_for: Any,
) -> None:
    """What was not written is 0."""
    data = random_array([min(size, 30 // len(sizes)) for size, _ in sizes], kind, seed)
    data[rows:] = 0
    with tempfile.TemporaryDirectory() as path:
        write_n5(path, data, [side for _, side in sizes], compression, rows)
        volume = open_volume(path)
        assert "n5 by tensorstore" in tensorstore_of(volume).how
        for one in (volume, tensorstore_of(volume)):
            assert same_bits(whole(one, seed), data)
        memory = memory_for(volume, slots)
        boxes_equal(reader_of(volume), data, seed, 3)
        boxes_equal(reader_of(volume, memory.opened()), data, seed, 3)
        memory.close()


def test_small_chunks_are_read_some_at_a_time(tmp_path: Path) -> None:
    data = random_array((100, 90, 80), "u2", 0)
    write_n5(tmp_path / "x.n5", data, (16, 16, 16))
    volume = tensorstore_of(open_volume(tmp_path / "x.n5"))
    assert all(side % 16 == 0 for side in volume.grid.unit)
    assert volume.unit_nbytes >= 1 << 18
    np.testing.assert_array_equal(whole(volume), data)


def test_large_chunks_are_units(tmp_path: Path) -> None:
    write_n5(tmp_path / "x.n5", np.zeros((200, 200, 200), np.uint8), (100, 80, 70), rows=1)
    assert open_volume(tmp_path / "x.n5").grid.unit == (100, 80, 70)


def test_an_array_within_a_container_is_named_behind_a_slash(tmp_path: Path) -> None:
    data = np.arange(12, dtype=np.int32).reshape(3, 4)
    (tmp_path / "x.n5").mkdir()
    (tmp_path / "x.n5" / "attributes.json").write_text('{"n5": "2.0.0"}')
    write_n5(tmp_path / "x.n5" / "a" / "b", data, (2, 2))
    np.testing.assert_array_equal(whole(open_volume(f"{tmp_path}/x.n5/a/b")), data)
    with pytest.raises(VolumeError, match=rf"{tmp_path}/x\.n5 cannot be opened"):
        open_volume(tmp_path / "x.n5")


def test_damaged_metadata_are_an_error_that_names_the_volume(tmp_path: Path) -> None:
    write_n5(tmp_path / "x.n5", np.zeros((3, 4)), (2, 2))
    for text in ("", "{", '{"dimensions": [1]}', "[]"):
        (tmp_path / "x.n5" / "attributes.json").write_text(text)
        with pytest.raises(VolumeError, match=r"x\.n5 cannot be opened by tensorstore"):
            open_volume(tmp_path / "x.n5")


def test_a_damaged_chunk_is_named_with_its_place(tmp_path: Path) -> None:
    data = np.arange(48, dtype=np.int16).reshape(6, 8)
    write_n5(tmp_path / "x.n5", data, (3, 4))
    volume = open_volume(tmp_path / "x.n5")
    files = [file for file in (tmp_path / "x.n5").rglob("*") if file.is_file() and file.suffix != ".json"]
    content = files[0].read_bytes()
    for length in (0, 1, 5, 12, len(content) // 2, len(content) - 1):
        files[0].write_bytes(content[:length])
        with pytest.raises(DamagedUnitError, match=r"x\.n5, the part at \[0:6, 0:8\]: "):
            whole(volume)
    files[0].write_bytes(content)
    np.testing.assert_array_equal(whole(volume), data)


def test_it_can_be_sent_to_another_process(tmp_path: Path) -> None:
    data = np.arange(48, dtype=np.int16).reshape(6, 8)
    write_n5(tmp_path / "x.n5", data, (3, 4))
    np.testing.assert_array_equal(whole(pickle.loads(pickle.dumps(open_volume(tmp_path / "x.n5")))), data)


def test_units_of_a_patch_are_asked_for_together(tmp_path: Path) -> None:
    write_n5(tmp_path / "x.n5", np.zeros((6, 8)), (3, 4))
    volume = tensorstore_of(open_volume(tmp_path / "x.n5"))
    assert len(set(volume.stored_in(np.arange(5)).tolist())) == 1


def test_its_state_changes_with_its_files(tmp_path: Path) -> None:
    store = write_n5(tmp_path / "x.n5", np.zeros((6, 8)), (3, 4), rows=3)
    volume = tensorstore_of(open_volume(tmp_path / "x.n5"))
    before = volume.state()
    assert volume.state() == before
    store[3:] = 1
    assert volume.state() != before


def test_a_forked_process_says_that_it_cannot_read(
    tmp_path: Path, in_child: Callable[[Callable[[], object]], None]
) -> None:
    """It would wait for threads that it has not."""
    write_n5(tmp_path / "x.n5", np.zeros((6, 8)), (3, 4))
    volume = open_volume(tmp_path / "x.n5")

    def work() -> None:
        for what in (volume.open, lambda: open_volume(tmp_path / "x.n5")):
            with pytest.raises(
                VolumeError, match=r"threads do not survive a fork: .*multiprocessing_context"
            ):
                what()

    in_child(work)


def test_a_url_of_this_machine_s_files(tmp_path: Path) -> None:
    data = np.arange(48, dtype=np.int16).reshape(6, 8)
    write_n5(tmp_path / "x.n5", data, (3, 4))
    volume = open_volume(f"file://{tmp_path}/x.n5/")
    assert tensorstore_of(volume).name == f"file://{tmp_path}/x.n5/"
    np.testing.assert_array_equal(whole(volume), data)
    assert volume.state() == ("", ""), "nobody knows it of what a URL names"


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Nowhere."""


class _Server(ThreadingHTTPServer):
    request_queue_size = 256  # tensorstore asks for all chunks at the same time


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """The URL of a folder that is served to this machine."""
    made = _Server(("127.0.0.1", 0), functools.partial(_Quiet, directory=os.fspath(tmp_path)))
    made.daemon_threads = False
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{made.server_port}"
    made.shutdown()
    thread.join()
    made.server_close()


@pytest.mark.parametrize("version", [2, 3])
def test_a_url_of_a_server(tmp_path: Path, server: str, version: Any) -> None:
    data = np.arange(600, dtype=np.int32).reshape(20, 30)
    zarr.create_array(tmp_path / "x.zarr", data=data, chunks=(7, 8), zarr_format=version)
    volume = open_volume(f"{server}/x.zarr/")
    np.testing.assert_array_equal(whole(volume), data)
    boxes_equal(reader_of(volume), data, 0, 4)
    with pytest.raises(VolumeError, match=rf"{server}/nothing/ cannot be opened by tensorstore"):
        open_volume(f"{server}/nothing/")


def test_an_array_that_begins_elsewhere_is_read_from_its_beginning(tmp_path: Path) -> None:
    data = np.arange(50 * 20 * 10, dtype="u4").reshape(50, 20, 10, 1)
    store = tensorstore.open(
        {
            "driver": "neuroglancer_precomputed", "kvstore": {"driver": "file", "path": f"{tmp_path}/x/"},
            "multiscale_metadata": {"data_type": "uint32", "num_channels": 1, "type": "image"},
            "scale_metadata": {
                "size": data.shape[:3], "encoding": "raw", "chunk_size": [16, 16, 16], "resolution": [1, 1, 1],
                "voxel_offset": [8, 3, 0],
            },
        },
        create=True,
    ).result()  # fmt: skip
    store[tensorstore.d[:].translate_to[0]].write(data).result()
    np.testing.assert_array_equal(whole(open_volume(f"file://{tmp_path}/x/")), data)


def test_a_damaged_chunk_spoils_no_box_beside_it(tmp_path: Path) -> None:
    data = np.arange(24 * 24, dtype="u2").reshape(24, 24)
    write_n5(tmp_path / "x.n5", data, (8, 8))
    (tmp_path / "x.n5" / "0" / "0").write_bytes(b"damaged")
    reader, out = reader_of(open_volume(f"file://{tmp_path}/x.n5/")), np.zeros((9, 9), "u2")
    reader.read([8, 8], out)
    np.testing.assert_array_equal(out, data[8:17, 8:17])
    with pytest.raises(DamagedUnitError):
        reader.read([7, 7], out)


@pytest.mark.parametrize("address", ["http://me:word@127.0.0.1:1/x.n5/", "http://127.0.0.1:1/x.n5/?key=word"])
def test_passwords_in_an_address_are_in_no_message(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(spec: Any, **_: Any) -> Any:
        assert spec["kvstore"] == address
        raise ValueError(f"NOT_FOUND: {address} is not there")

    monkeypatch.setattr(tensorstore, "open", failing)
    with pytest.raises(VolumeError, match=r"http://127\.0\.0\.1:1/x\.n5/ cannot be opened") as caught:
        open_volume(address)
    assert "word" not in str(caught.value)


@pytest.mark.parametrize(
    ("said", "is_damaged"),
    [("FAILED_PRECONDITION: x", True), ("DATA_LOSS: x", True), ("UNAVAILABLE: x", False)],
)
def test_an_outage_is_no_damage(
    tmp_path: Path, said: str, is_damaged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing:
        def __getitem__(self, box: Any) -> Any:
            return self

        def read(self, order: str) -> Any:
            return self

        def result(self) -> Any:
            raise ValueError(said)

    write_n5(tmp_path / "x.n5", np.zeros((8, 8), "u2"), (8, 8))
    volume = TensorStoreVolume("x", {"driver": "n5", "kvstore": f"file://{tmp_path}/x.n5/"})
    monkeypatch.setattr(volume, "store", Failing)
    with pytest.raises(VolumeError, match=said) as caught:
        volume.open().read(np.zeros(1, np.int64), [np.zeros(volume.unit_nbytes, np.uint8)])
    assert isinstance(caught.value, DamagedUnitError) == is_damaged
