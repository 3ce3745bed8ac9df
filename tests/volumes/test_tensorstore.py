"""Arrays that tensorstore reads: what is peculiar to N5 and to whatever is named by a URL."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import tensorstore
import zarr
from volume_files import write_n5
from volume_kit import boxes_equal, random_array, reader_of, whole

from fastpipe.errors import VolumeError
from fastpipe.volumes.opening import open_volume
from fastpipe.volumes.tensorstore import TensorStoreVolume
from fastpipe.volumes.volume import DamagedUnitError

DATA = np.arange(48, dtype=np.int16).reshape(6, 8)


def test_chunks_are_read_some_at_a_time_where_they_are_small(tmp_path: Path) -> None:
    data = random_array((100, 90, 80), "u2", 0)
    write_n5(tmp_path / "x.n5", data, (16, 16, 16))
    volume = open_volume(tmp_path / "x.n5")
    assert all(side % 16 == 0 for side in volume.grid.unit)
    assert volume.unit_nbytes >= 1 << 18
    assert len(set(volume.stored_in(np.arange(5)).tolist())) == 1, "units of a patch are asked for together"
    np.testing.assert_array_equal(whole(volume), data)
    write_n5(tmp_path / "y.n5", np.zeros((200, 200, 200), np.uint8), (100, 80, 70), rows=1)
    assert open_volume(tmp_path / "y.n5").grid.unit == (100, 80, 70)


def test_an_array_within_a_container_is_named_behind_a_slash(tmp_path: Path) -> None:
    (tmp_path / "x.n5").mkdir()
    (tmp_path / "x.n5" / "attributes.json").write_text('{"n5": "2.0.0"}')
    write_n5(tmp_path / "x.n5" / "a" / "b", DATA, (2, 2))
    np.testing.assert_array_equal(whole(open_volume(f"{tmp_path}/x.n5/a/b")), DATA)
    with pytest.raises(VolumeError, match=rf"{tmp_path}/x\.n5 cannot be opened"):
        open_volume(tmp_path / "x.n5")
    for text in ("", "{", '{"dimensions": [1]}', "[]"):
        (tmp_path / "x.n5" / "attributes.json").write_text(text)
        with pytest.raises(VolumeError, match=r"x\.n5 cannot be opened by tensorstore"):
            open_volume(tmp_path / "x.n5")


def test_a_chunk_that_is_cut_off_is_named_with_its_place(tmp_path: Path) -> None:
    store = write_n5(tmp_path / "x.n5", DATA, (3, 4))
    volume, file = open_volume(tmp_path / "x.n5"), tmp_path / "x.n5" / "0" / "0"
    content, before = file.read_bytes(), volume.state()
    for length in (0, 1, 5, 12, len(content) // 2, len(content) - 1):
        file.write_bytes(content[:length])
        with pytest.raises(DamagedUnitError, match=r"x\.n5, the part at \[0:6, 0:8\]: "):
            whole(volume)
    file.write_bytes(content)
    np.testing.assert_array_equal(whole(volume), DATA)
    store[3:] = 1
    assert volume.state() != before


def test_a_forked_process_says_that_it_cannot_read(tmp_path: Path, in_child: Any) -> None:
    """It would wait for threads that it has not."""
    write_n5(tmp_path / "x.n5", DATA, (3, 4))
    volume = open_volume(tmp_path / "x.n5")

    def work() -> None:
        for call in (volume.open, lambda: open_volume(tmp_path / "x.n5")):
            with pytest.raises(
                VolumeError, match=r"threads do not survive a fork: .*multiprocessing_context"
            ):
                call()

    in_child(work)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:

    class Server(ThreadingHTTPServer):
        request_queue_size = 256  # tensorstore asks for all chunks at the same time
        daemon_threads = False

    with Server(
        ("127.0.0.1", 0), functools.partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    ) as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{made.server_port}"
        made.shutdown()
        thread.join()


def test_an_array_on_a_server_is_read_by_its_url(tmp_path: Path, server: str) -> None:
    data = np.arange(600, dtype=np.int32).reshape(20, 30)
    for version in (2, 3):
        zarr.create_array(tmp_path / f"{version}.zarr", data=data, chunks=(7, 8), zarr_format=version)
        volume = open_volume(f"{server}/{version}.zarr/")
        np.testing.assert_array_equal(whole(volume), data)
        boxes_equal(reader_of(volume), data, 0, 4)
    with pytest.raises(VolumeError, match=rf"{server}/nothing/ cannot be opened by tensorstore"):
        open_volume(f"{server}/nothing/")


def test_an_array_that_begins_elsewhere_is_read_from_its_beginning(tmp_path: Path) -> None:
    data = np.arange(50 * 20 * 10, dtype="u4").reshape(50, 20, 10, 1)
    spec = {
        "driver": "neuroglancer_precomputed", "kvstore": {"driver": "file", "path": f"{tmp_path}/x/"},
        "multiscale_metadata": {"data_type": "uint32", "num_channels": 1, "type": "image"},
        "scale_metadata": {
            "size": data.shape[:3], "encoding": "raw", "chunk_size": [16, 16, 16], "resolution": [1, 1, 1],
            "voxel_offset": [8, 3, 0],
        },
    }  # fmt: skip
    store = tensorstore.open(spec, create=True).result()
    store[tensorstore.d[:].translate_to[0]].write(data).result()
    np.testing.assert_array_equal(whole(open_volume(f"file://{tmp_path}/x/")), data)


@pytest.mark.parametrize("address", ["http://me:word@127.0.0.1:1/x.n5/", "http://127.0.0.1:1/x.n5/?key=word"])
def test_passwords_in_an_address_are_in_no_message(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(spec: Any, **_: Any) -> Any:
        assert spec["kvstore"] == address
        raise ValueError(f"NOT_FOUND: {address} is not there")

    monkeypatch.setattr(tensorstore, "open", failing)
    with pytest.raises(VolumeError, match=r"http://127\.0\.0\.1:1/x\.n5/ cannot be opened") as caught:
        open_volume(address)
    assert "word" not in str(caught.value)


@pytest.mark.parametrize("said", ["FAILED_PRECONDITION: x", "DATA_LOSS: x", "UNAVAILABLE: x"])
def test_an_outage_is_no_damage(tmp_path: Path, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write_n5(tmp_path / "x.n5", DATA, (8, 8))
    volume = TensorStoreVolume("x", {"driver": "n5", "kvstore": f"file://{tmp_path}/x.n5/"})
    store = MagicMock()
    store.__getitem__.return_value.read.return_value.result.side_effect = ValueError(said)
    monkeypatch.setattr(volume, "store", lambda: store)
    with pytest.raises(VolumeError, match=said) as caught:
        volume.open().read(np.zeros(1, np.int64), [np.zeros(volume.unit_nbytes, np.uint8)])
    assert isinstance(caught.value, DamagedUnitError) == ("UNAVAILABLE" not in said)
