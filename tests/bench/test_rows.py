"""The rows: what is drawn, what is decoded, what a peer's process answers."""

from __future__ import annotations

import collections
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastpipe
from benchmarks.floor import DecodeRow
from benchmarks.peers.children.spdl import crop_box
from fastpipe.bench.data import scan
from fastpipe.bench.images import LoaderRow, LoaderSpec, check_transform, loader_specs, worker_counts
from fastpipe.bench.machine import describe, memory_bytes
from fastpipe.bench.runner import ContenderError, Draws
from fastpipe.core.machine import ControlGroups


def test_draws_use_every_photo_equally_and_in_changing_order() -> None:
    draws = Draws([3, 5, 7], 9)
    first, second = list(draws), list(draws)
    assert collections.Counter(first) == {3: 3, 5: 3, 7: 3}
    assert first != second
    draws.length = 4
    assert len(list(draws)) == len(draws) == 4


def test_the_replaced_row_consumes_what_it_is_asked_for(tree: Path) -> None:
    row = LoaderRow(LoaderSpec("replaced-workers0", "label", "replaced"), tree, range(6), batch_size=4)
    assert row.measure(8) > 0
    row.close()
    row.close()


@pytest.mark.parametrize("from_memory", [True, False])
def test_the_floor_decodes_crops(tree: Path, from_memory: bool) -> None:
    row = DecodeRow(scan(tree, "tree").files, threads=2, batch_size=4, from_memory=from_memory)
    assert row.measure(40) > 0
    row.close()


def test_after_the_floor_loaders_resample_again(tree: Path) -> None:
    def values() -> Any:
        transform = check_transform()
        loader = fastpipe.FastLoader(fastpipe.FastImageFolder(str(tree), transform, cache="off"), 6)
        return next(iter(loader))[0].numpy().copy()

    before = values()
    row = DecodeRow(scan(tree, "tree").files, threads=2, batch_size=4)
    row.measure(4)
    row.close()
    assert before.any() and (values() == before).all()


def test_the_floor_needs_a_jpeg(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"\x89PNG")
    with pytest.raises(ContenderError, match="JPEG"):
        DecodeRow([str(tmp_path / "a.png")], threads=1, batch_size=4)


def test_a_floor_that_cannot_decode_says_so(tmp_path: Path, tree: Path) -> None:
    good = Path(scan(tree, "tree").files[0]).read_bytes()
    (tmp_path / "a.jpg").write_bytes(good)
    row = DecodeRow([str(tmp_path / "a.jpg")], threads=2, batch_size=4)
    row._blobs = [b"\xff\xd8\xff\xe0 no more"]
    with pytest.raises(ContenderError, match="decoding alone failed for 8 of 8"):
        row.measure(8)


def test_boxes_lie_inside_and_have_the_areas_of_random_resized_crop() -> None:
    rng = np.random.default_rng(1)
    top, left, height, width = np.array([crop_box(300, 400, rng) for _ in range(3000)]).T
    assert (top >= 0).all() and (left >= 0).all()
    assert (top + height <= 300).all() and (left + width <= 400).all()
    share = height * width / (300 * 400)
    assert 0.07 < share.min() < 0.09 and share.max() > 0.9
    # Uniform from 8 to 100 %, less the boxes that do not fit.
    assert 0.4 < share.mean() < 0.54


def test_every_row_has_its_own_key() -> None:
    for cores in (1, 2, 4, 64):
        keys = [spec.key for spec in loader_specs(cores)]
        assert len(keys) == len(set(keys)) == 2 * len(worker_counts(cores)) + 9
        large = [spec for spec in loader_specs(cores, is_large=True) if spec.key not in keys]
        assert [(spec.key, spec.decode.scaled) for spec in large] == [("fastloader-scaled", True)]
    assert worker_counts(64)[-1] == 64


@pytest.mark.parametrize("cache", ["ram", "disk"])
def test_a_cached_row_decodes_nothing_while_it_is_measured(tree: Path, cache: Any) -> None:
    spec = next(spec for spec in loader_specs(2) if spec.key == f"cached-{cache}-256")
    row = LoaderRow(spec, tree, range(4), 2)
    try:
        row.measure(2)  # fills it first
        kept = row.dataset._running().cache.store
        assert len(kept.entries()) >= 4
        before = row.dataset.clock.totals()
        row.dataset._running().maker.open_image = _only_kept(row.dataset._running().maker.open_image)
        assert row.measure(8) > 0
        assert row.dataset.clock.totals() != before
    finally:
        row.close()


def _only_kept(open_image: Any) -> Any:
    def open_found(found: Any, path: str) -> Any:
        assert found.entry is not None, f"{path} is decoded again"
        return open_image(found, path)

    return open_found


def test_a_limit_of_the_container_counts(tmp_path: Path) -> None:
    group = tmp_path / "sys" / "fs" / "cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("1073741824\n")
    assert memory_bytes(ControlGroups(tmp_path)) == 2**30
    (group / "memory.max").write_text("max\n")
    assert memory_bytes(ControlGroups(tmp_path)) == memory_bytes(ControlGroups(tmp_path / "none"))


def test_the_machine_is_described_without_its_name() -> None:
    import platform

    described = json.dumps(describe())
    assert describe()["cores"] >= 1
    assert platform.node() == "" or platform.node() not in described
