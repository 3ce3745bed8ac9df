"""Whatever the store does meanwhile: every sample comes exactly once, and equal to its source."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from delay_proxy import Faults
from torchvision import transforms as v1

from fastpipe import FastImageFolder, FastLoader
from fastpipe.errors import BadSampleError

SMALL = v1.Compose([v1.Resize(20), v1.CenterCrop(16), v1.ToTensor()])
_PROMPT = Faults(delay_ms=0, jitter_ms=0)


def _put_tree(s3: Any, photo_tree: Path, copies: int) -> str:
    """A bucket with the tree's files, each so many times."""
    name: str = s3.bucket()
    files = [path for path in sorted(photo_tree.rglob("*")) if path.is_file()]
    with ThreadPoolExecutor(8) as pool:
        for copy in range(copies):
            keys = [f"train/{path.parent.name}/{copy}-{path.name}" for path in files]
            list(pool.map(lambda path, key: s3.put(name, key, path.read_bytes()), files, keys))
    return name


@pytest.fixture(scope="module")
def bucket(s3: Any, photo_tree: Path) -> str:
    return _put_tree(s3, photo_tree, 5)


@pytest.fixture(scope="module")
def expected(s3: Any, bucket: str, photo_tree: Path) -> dict[str, torch.Tensor]:
    """What each path is, from the file that was put there."""
    local = FastImageFolder(photo_tree, SMALL, cache="off")
    images = {Path(path): local[index][0] for index, (path, _) in enumerate(local.samples)}
    local.close()
    return {
        f"s3://{bucket}/train/{path.parent.name}/{copy}-{path.name}": image
        for path, image in images.items() for copy in range(5)
    }  # fmt: skip


@pytest.fixture(params=["ahead", "staged"])
def near(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """Options of a dataset: without a stage, and with one."""
    return {"stage": tmp_path / "stage"} if request.param == "staged" else {}


def _dataset(bucket: str, options: dict[str, Any], **more: Any) -> FastImageFolder:
    return FastImageFolder(f"s3://{bucket}/train", SMALL, storage_options=options, seed=3, **more)


def _check_epoch(dataset: Any, expected: Any, during: Callable[[int], Any] = lambda step: None) -> None:
    """Load an epoch, and compare each sample with its source; ``during`` is called before each batch."""
    loader = FastLoader(dataset, 8, shuffle=True)
    batches: Any = loader._order.ours().indices(loader._order.next_epoch)  # type: ignore[union-attr]
    wanted = [[dataset.samples[index][0] for index in indices] for indices, _ in batches]
    for step, (images, _) in enumerate(loader):
        during(step)
        assert torch.equal(images, torch.stack([expected[path] for path in wanted[step]]))
    assert step + 1 == len(wanted) and sum(map(len, wanted)) == len(dataset) == len(expected)


@pytest.mark.few(2)
@pytest.mark.parametrize("fault", [{"busy": 0.1}, {"cut": 0.1, "cut_after": 700}, {"busy": 0.1, "cut": 0.1}])
def test_an_epoch_is_whole_where_a_store_fails_now_and_then(
    fault: dict[str, Any], s3: Any, bucket: str, expected: Any, near: Any
) -> None:
    with s3.proxy(_PROMPT) as proxy:
        dataset = _dataset(bucket, proxy.options, **near)
        proxy.change(**fault)
        for _ in range(2):
            _check_epoch(dataset, expected)
        counts = proxy.counts()
        dataset.close()
    assert counts.busy + counts.cut > 0


def test_an_epoch_is_whole_where_a_gateway_is_killed_and_comes_back(
    s3: Any, bucket: str, expected: Any, near: Any
) -> None:
    def during(step: int) -> None:
        if step == 2:
            s3.stop_gateway(kill=True)
            s3.start_gateway()  # by this thread, with whose end it would end; requests fail meanwhile

    dataset = _dataset(bucket, s3.options, **near)
    _check_epoch(dataset, expected, during)
    dataset.close()


def test_a_stage_that_takes_nothing_more_costs_only_downloads(
    s3: Any, bucket: str, expected: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    dataset = _dataset(bucket, s3.options, stage=tmp_path / "stage")
    write, number = os.write, itertools.count()

    def full(descriptor: int, data: Any) -> int:
        if "/writing/" in os.readlink(f"/proc/self/fd/{descriptor}") and next(number) >= 20:
            raise OSError(28, "No space left on device")
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", full)
    for _ in range(2):
        _check_epoch(dataset, expected)
    monkeypatch.undo()
    assert caplog.text.count("No space left on device") == 1
    dataset.close()


def test_a_stage_that_vanishes_costs_only_downloads(
    s3: Any, bucket: str, expected: Any, tmp_path: Path
) -> None:
    dataset = _dataset(bucket, s3.options, stage=tmp_path / "stage")
    _check_epoch(dataset, expected, lambda step: step == 3 and (tmp_path / "stage").rename(tmp_path / "x"))
    _check_epoch(dataset, expected)
    dataset.close()


def test_an_object_that_is_deleted_meanwhile_is_a_bad_sample(s3: Any, photo_tree: Path) -> None:
    name = _put_tree(s3, photo_tree, 1)
    dataset = _dataset(name, s3.options, bad_samples="skip")
    s3.delete(name, key := dataset.samples[3][0].removeprefix(f"s3://{name}/"))
    assert sum(len(labels) for _, labels in FastLoader(dataset, 5)) == len(dataset) - 1
    dataset.bad_samples = type(dataset.bad_samples)("raise")
    with pytest.raises(BadSampleError, match=key):
        list(FastLoader(dataset, 5))
    dataset.close()
