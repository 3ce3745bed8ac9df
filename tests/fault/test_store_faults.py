"""Whatever the store does meanwhile: every sample comes exactly once, and equal to its source."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from delay_proxy import Faults
from torchvision import transforms as v1

from fastpipe import FastImageFolder, FastLoader, Stage
from fastpipe.errors import BadSampleError, StoreAccessError
from fastpipe.stores.stage import StageFolder

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
    return {"stage": Stage(tmp_path / "stage")} if request.param == "staged" else {}


def _dataset(bucket: str, options: dict[str, Any], **more: Any) -> FastImageFolder:
    return FastImageFolder(f"s3://{bucket}/train", SMALL, storage_options=options, seed=3, **more)


def _check_epoch(
    dataset: FastImageFolder,
    expected: dict[str, torch.Tensor],
    during: Callable[[int], Any] = lambda step: None,
) -> None:
    """Load an epoch, and compare each sample with its source; ``during`` is called before each batch."""
    loader = FastLoader(dataset, 8, shuffle=True)
    batches = loader._order.ours().indices(loader._order.next_epoch)  # type: ignore[union-attr]
    order, at = [index for indices, _ in batches for index in indices], 0
    for step, (images, _) in enumerate(loader):
        during(step)
        for image in images:
            assert torch.equal(image, expected[dataset.samples[order[at]][0]])
            at += 1
    assert at == len(dataset) == len(expected)


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
    dataset = _dataset(bucket, s3.options, **near)

    def during(step: int) -> None:
        if step == 2:
            s3.stop_gateway(kill=True)
            s3.start_gateway()  # by this thread, with whose end it would end; requests fail meanwhile

    _check_epoch(dataset, expected, during)
    dataset.close()


_TRAINING = """
import sys
from torchvision import transforms as v1
from fastpipe import FastImageFolder, FastLoader, Stage
url, stage, options = sys.argv[1], sys.argv[2], eval(sys.argv[3])
dataset = FastImageFolder(url, v1.Compose([v1.Resize(20), v1.CenterCrop(16), v1.ToTensor()]),
                          storage_options=options, seed=int(sys.argv[4]), stage=Stage(stage))
count = 0
for images, _ in FastLoader(dataset, 8, shuffle=True):
    count += len(images)
    print(count, flush=True)
print("done", *dataset.downloaded, flush=True)
"""


def _train(bucket: str, stage: Path, options: dict[str, Any], seed: int = 0) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _TRAINING, f"s3://{bucket}/train", str(stage), repr(options), str(seed)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_a_training_that_is_killed_leaves_a_stage_that_serves_the_next(
    s3: Any, bucket: str, expected: Any, tmp_path: Path
) -> None:
    with s3.proxy(Faults(delay_ms=20, jitter_ms=10)) as proxy:
        for killed_at in (1, 5):
            with _train(bucket, tmp_path / "stage", proxy.options) as training:
                assert training.stdout is not None
                for _ in range(killed_at):
                    training.stdout.readline()
                os.kill(training.pid, signal.SIGKILL)
        dataset = _dataset(bucket, proxy.options, stage=tmp_path / "stage")
        for _ in range(2):
            _check_epoch(dataset, expected)
        assert dataset.downloaded[0] < len(dataset)  # the rest was there
        dataset.close()


@pytest.mark.slow
def test_two_trainings_share_a_stage_and_download_each_object_once(
    s3: Any, bucket: str, expected: Any, tmp_path: Path
) -> None:
    with s3.proxy(Faults(delay_ms=20, jitter_ms=10)) as proxy:
        with _train(bucket, tmp_path / "stage", proxy.options, 1) as first:
            with _train(bucket, tmp_path / "stage", proxy.options, 2) as second:
                said = [training.communicate()[0].splitlines() for training in (first, second)]
        dataset = _dataset(bucket, proxy.options, stage=tmp_path / "stage")
        _check_epoch(dataset, expected)
        assert dataset.downloaded == (0, 0)
        dataset.close()
    counts = [int(lines[-1].split()[1]) for lines in said]
    assert [lines[-2] for lines in said] == [str(len(expected))] * 2
    assert sum(counts) == len(expected)


def test_a_stage_that_takes_nothing_more_costs_only_downloads(
    s3: Any, bucket: str, expected: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    dataset = _dataset(bucket, s3.options, stage=tmp_path / "stage")
    write, written = os.write, []

    def full(descriptor: int, data: Any) -> int:
        if "/writing/" in os.readlink(f"/proc/self/fd/{descriptor}"):
            written.append(len(data))
            if len(written) > 20:
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


def test_a_stage_of_half_the_data_fetches_the_other_half_again(
    s3: Any, bucket: str, expected: Any, tmp_path: Path
) -> None:
    probe = _dataset(bucket, s3.options)
    half = sum(probe._remote.listing.sizes.tolist()) // 2  # type: ignore[union-attr]
    stage = Stage(tmp_path / "stage", max_bytes=half, read_ahead=1 << 16)
    dataset = _dataset(bucket, s3.options, stage=stage)
    before, counted = 0, list[int]()
    with contextlib.closing(StageFolder(stage)) as folder:
        # While it fetches ahead, files come and go as they are looked at.  What is counted is one number,
        # here that of another user: with what is being written, and what is reserved for more.
        for epoch in range(3):
            _check_epoch(dataset, expected, lambda step: counted.append(folder.ledger.nbytes))
            fetched, before = dataset.downloaded[0] - before, dataset.downloaded[0]
            assert epoch == 0 or fetched <= 0.6 * len(dataset)
        dataset.close()
        assert max(counted) <= half
        objects = (tmp_path / "stage" / "fastpipe-stage" / "objects").glob("*/*")
        assert half * 0.8 < folder.ledger.nbytes == sum(path.stat().st_size for path in objects) <= half


def test_secrets_are_in_no_error_repr_or_pickle(s3: Any, bucket: str, tmp_path: Path) -> None:
    with pytest.raises(StoreAccessError, match=f"s3://{bucket}/") as caught:
        _dataset(bucket, {**s3.options, "secret": "hush-hush-wrong"}, refresh=True)
    assert "hush-hush-wrong" not in str(caught.value)
    dataset = _dataset(bucket, s3.options, stage=tmp_path / "stage", cache="off")
    loader, secret = FastLoader(dataset, 8), s3.options["secret"]
    for text in (repr(dataset), repr(dataset.plan), repr(loader.plan), repr(vars(dataset))):
        assert secret not in text
    assert secret.encode() not in pickle.dumps(dataset)
    with pytest.raises(StoreAccessError, match="storage_options"):
        pickle.loads(pickle.dumps(dataset))[0]
    dataset.close()


def test_workers_of_every_kind_read_the_store(s3: Any, bucket: str, expected: Any, near: Any) -> None:
    for context in ("fork", "forkserver"):
        dataset = _dataset(bucket, s3.options, **near)
        loader = FastLoader(dataset, 8, num_workers=2, workers="processes", multiprocessing_context=context)
        images = torch.cat([images for images, _ in loader])
        assert len(images) == len(expected)
        for image, (path, _) in zip(images, dataset.samples, strict=True):
            assert torch.equal(image, expected[path])
        dataset.close()


def test_an_object_that_is_deleted_meanwhile_is_a_bad_sample(s3: Any, photo_tree: Path) -> None:
    name = _put_tree(s3, photo_tree, 1)
    dataset = _dataset(name, s3.options, bad_samples="skip")
    key = dataset.samples[3][0].removeprefix(f"s3://{name}/")
    s3.delete(name, key)
    assert sum(len(labels) for _, labels in FastLoader(dataset, 5)) == len(dataset) - 1
    dataset.bad_samples = type(dataset.bad_samples)("raise")
    with pytest.raises(BadSampleError, match=key):
        list(FastLoader(dataset, 5))
    dataset.close()


def test_an_object_that_is_replaced_meanwhile_is_used_as_it_is(s3: Any, photo_tree: Path, near: Any) -> None:
    name = _put_tree(s3, photo_tree, 1)
    dataset = _dataset(name, s3.options, **near)
    first, second = (path.removeprefix(f"s3://{name}/") for path, _ in dataset.samples[:2])
    s3.put(name, first, (photo_tree / second.removeprefix("train/").replace("0-", "")).read_bytes())
    for _ in range(2):
        images = torch.cat([images for images, _ in FastLoader(dataset, 5)])
        assert torch.equal(images[0], images[1])
    dataset.close()
