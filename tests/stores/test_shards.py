"""Shards in a store, against the same shards on a disk."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from fastpipe.core.archive_paths import ChangedArchiveError
from fastpipe.core.files import read_file
from fastpipe.core.shards import read_shards, shard_paths
from fastpipe.errors import OptionError
from fastpipe.stores import shards
from fastpipe.stores.fetching import new_reader
from fastpipe.stores.locations import Location
from fastpipe.stores.opening import open_store
from fastpipe.stores.shards import ShardStore, find_shards, read_remote_shards


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Shards in a folder, and under the same path in fsspec's file system in memory."""
    for number in range(3):
        with tarfile.open(tmp_path / f"x-{number}.tar", "w") as archive:
            for place in range(20):
                files = {"jpg": bytes([place]) * (place * 97), "cls": b"%d" % place, "txt": b"t" * place}
                for kind, content in files.items():
                    member = tarfile.TarInfo(f"{number}/{'n' * place * 9}{place}.{kind}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
    system = fsspec.filesystem("memory")
    for path in tmp_path.glob("*.tar"):
        system.pipe(str(path), path.read_bytes())
    yield tmp_path
    system.rm(str(tmp_path), recursive=True)


def _found(*patterns: str) -> tuple[Any, Location, Any]:
    location = Location.of("memory://")
    store = open_store(location.root)[0]
    return store, location, find_shards(store, location, patterns)


@pytest.mark.parametrize("block", [1, 100, 513, 1 << 20])
def test_samples_are_those_of_the_files(folder: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(shards, "_BLOCK", block)
    names = ["cls", "txt", "__key__"]
    local = read_shards(shard_paths(f"{folder}/x-{{0..2}}.tar"), "jpg", names, False)
    store, location, objects = _found(f"memory://{folder}/x-{{0..2}}.tar")
    remote, listing = read_remote_shards(store, location, objects, "jpg", names, False)
    assert remote.columns == local.columns
    assert remote.where(3) == local.where(3).replace(str(folder), f"memory://{folder}")
    reader = new_reader(ShardStore(store), listing, None, location.key)
    for row, path in enumerate(local.images):
        assert listing.find(remote.images[row]) == row
        assert reader.read(remote.images[row], row) == read_file(path)
        assert reader.read(remote.images[row], -1) == read_file(path)
    reader.close()


def test_patterns_name_objects(folder: Path) -> None:
    def names(*patterns: str) -> list[str]:
        return [
            Path(shard.key).name for shard in _found(*(f"memory://{folder}/{one}" for one in patterns))[2]
        ]

    assert names("x-{0..2}.tar") == names("x-*.tar") == names("*.tar") == ["x-0.tar", "x-1.tar", "x-2.tar"]
    assert names("x-2.tar", "x-[01].tar", "x-2.tar") == ["x-2.tar", "x-0.tar", "x-1.tar", "x-2.tar"]
    for pattern in ("x-3.tar", "y-*.tar"):
        with pytest.raises(FileNotFoundError, match=pattern.replace("*", r"\*")):
            names(pattern)
    with pytest.raises(FileNotFoundError):
        _found(f"memory://{folder.parent}/*.tar")  # a star stands for no slash
    with pytest.raises(
        OptionError, match=r"s3://other/x.tar is not in memory:///.*a dataset for each bucket"
    ):
        _found(f"memory://{folder}/x-0.tar", "s3://other/x.tar")
    with pytest.raises(OptionError, match=r"'gs://b/x.tar' must be in S3"):
        find_shards(open_store("memory://")[0], Location.of("gs://b"), ["gs://b/x.tar"])


def test_a_shard_that_changes_is_an_error(folder: Path) -> None:
    store, location, objects = _found(f"memory://{folder}/*.tar")
    remote, listing = read_remote_shards(store, location, objects, "jpg", ["cls"], False)
    fsspec.filesystem("memory").pipe(f"{folder}/x-1.tar", (folder / "x-1.tar").read_bytes() + bytes(512))
    reader = new_reader(ShardStore(store), listing, None, location.key)
    assert len(reader.read(remote.images[19], 19)) == 19 * 97
    for _ in range(2):
        with pytest.raises(ChangedArchiveError, match="the archive has changed since it was listed"):
            reader.read(remote.images[20], 20)
    reader.close()
