"""``tf.distribute`` and the tf.data service: each sample once per epoch."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import fastpipe
import fastpipe.tf
from fastpipe.errors import OptionError
from fastpipe.tf.stream import shard_of

_COUNT = 25


@pytest.fixture
def numbered(photo_table: Any) -> dict[str, Any]:
    """A table of 25 rows with numbers as labels."""
    paths = [photo_table.paths[n % len(photo_table)] for n in range(_COUNT)]
    return {"file": paths, "number": np.arange(_COUNT)}


def _dataset(table: dict[str, Any], engine: str, **options: Any) -> Any:
    options = {"image_size": 8, "seed": 3, "batch_size": 8, "engine": engine, **options}
    return fastpipe.tf.image_dataset(table, "number", parity="tf", **options)


# ---- replicas of one process ------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["threads", "graph"])
def test_mirrored(
    engine: str, numbered: dict[str, Any], two_replicas: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    strategy = two_replicas
    distributed = strategy.experimental_distribute_dataset(_dataset(numbered, engine))
    orders = []
    for _ in range(2):
        replicas: list[list[list[int]]] = [[], []]
        for _, labels in distributed:
            for replica, one in zip(replicas, strategy.experimental_local_results(labels), strict=True):
                replica.append(one.numpy().tolist())
        # The global batch is batch_size, of which each replica has a half.
        assert [[len(one) for one in replica] for replica in replicas] == [[4, 4, 4, 1], [4, 4, 4, 0]]
        seen = sum((one for step in zip(*replicas, strict=True) for one in step), [])
        assert sorted(seen) == list(range(_COUNT))
        orders.append(seen)
    assert orders[0] != orders[1]
    said = capfd.readouterr()
    assert "auto_shard" not in said.err.lower() and "autoshard" not in said.err.lower()


@pytest.mark.parametrize("engine", ["threads", "graph"])
def test_keras_fits_on_two_replicas(engine: str, numbered: dict[str, Any], two_replicas: Any) -> None:
    counts: list[int] = []

    class Counted(keras.layers.Layer):  # type: ignore[misc]
        def call(self, images: Any) -> Any:
            tf.numpy_function(lambda count: counts.append(int(count)), [tf.shape(images)[0]], [])
            return images

    with two_replicas.scope():
        model = keras.Sequential(
            [keras.Input((8, 8, 3)), Counted(), keras.layers.Flatten(), keras.layers.Dense(_COUNT)]
        )
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    rescaled = _dataset(numbered, engine, rescale=1 / 255)
    history = model.fit(rescaled, epochs=2, verbose=0, shuffle=False)
    assert np.isfinite(history.history["loss"]).all()
    assert sum(counts) == 2 * _COUNT


# ---- workers of several processes -----------------------------------------------------------------


def _ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()


@pytest.mark.few(2)
@pytest.mark.parametrize("how", ["plain", "auto", "graph", "shard of graph", "from function"])
def test_two_workers(how: str, photo_table: Any, tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    folder.mkdir()
    for number, path in enumerate(photo_table.paths[:5]):
        os.symlink(path, folder / f"{number}{Path(path).suffix}")
    ports = ",".join(map(str, _ports(2)))
    script = Path(__file__).with_name("worker_script.py")
    workers = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), ports, how, str(folder)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        said = [worker.communicate(timeout=120) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    for worker, (_, err) in zip(workers, said, strict=True):
        assert worker.returncode == 0, err[-3000:]
        assert "shard" not in err.lower()
    made = [json.loads(out) for out, _ in said]
    for epoch in range(2):
        one, other = (worker["epochs"][epoch] for worker in made)
        assert sorted(one["seen"] + other["seen"]) == list(range(_COUNT))
        assert abs(len(one["seen"]) - len(other["seen"])) <= 1
        assert one["steps"] == other["steps"]  # what an all-reduce says
        assert one["steps"][:2] == [8, 8] and sum(one["steps"]) == _COUNT
    assert made[0]["epochs"][0]["seen"] != made[0]["epochs"][1]["seen"]


# ---- which part is whose ----------------------------------------------------------------------------


def _config(monkeypatch: pytest.MonkeyPatch, task: str, index: int, **jobs: int) -> None:
    cluster = {job: [f"127.0.0.1:{n}" for n in range(1, count + 1)] for job, count in jobs.items()}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": task, "index": index}}))


def test_the_part_of_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    def auto() -> Any:
        return shard_of("auto", is_shuffled=True, seed=1)

    monkeypatch.delenv("TF_CONFIG", raising=False)
    assert auto() is None
    _config(monkeypatch, "worker", 1, worker=2)
    assert auto() == fastpipe.Shard(1, 2, "eval")
    _config(monkeypatch, "worker", 1, worker=2, chief=1)
    assert auto() == fastpipe.Shard(2, 3, "eval")
    _config(monkeypatch, "chief", 0, worker=2, chief=1)
    assert auto() == fastpipe.Shard(0, 3, "eval")
    _config(monkeypatch, "ps", 0, worker=2, ps=1)
    with pytest.raises(OptionError, match="its task is 'ps'"):
        auto()
    _config(monkeypatch, "worker", 0, worker=1)
    assert auto() is None
    context = tf.distribute.InputContext(3, 2, 6)
    assert shard_of(context, is_shuffled=False, seed=None) == fastpipe.Shard(2, 3, "eval")
    assert shard_of(fastpipe.Shard(1, 2), is_shuffled=True, seed=0) == fastpipe.Shard(1, 2)


def test_workers_need_one_order(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(OptionError, match="needs seed=, the same for all"):
        shard_of(fastpipe.Shard(0, 2), is_shuffled=True, seed=None)
    with pytest.raises(OptionError, match=r"a tf\.distribute\.InputContext or None, got 'all'"):
        shard_of("all", is_shuffled=True, seed=1)
    monkeypatch.delenv("TF_CONFIG", raising=False)
    with caplog.at_level(logging.WARNING, "fastpipe.tf"):
        assert shard_of(None, is_shuffled=True, seed=None) is None
        assert not caplog.records
        _config(monkeypatch, "worker", 0, worker=2)
        assert shard_of(None, is_shuffled=True, seed=1) is None
        assert shard_of(None, is_shuffled=False, seed=None) is None
        assert not caplog.records
        assert shard_of(None, is_shuffled=True, seed=None) is None
        assert "pass the same to all" in caplog.text


# ---- the tf.data service ----------------------------------------------------------------------------


@pytest.mark.leaks("servers of TensorFlow keep threads to the end of the process")
def test_data_service(numbered: dict[str, Any]) -> None:
    service = tf.data.experimental.service
    dispatcher = service.DispatchServer()
    address = dispatcher.target.split("://")[1]
    workers = [service.WorkerServer(service.WorkerConfig(dispatcher_address=address)) for _ in range(2)]
    try:
        dataset = _dataset(numbered, "graph")
        served = dataset.apply(
            service.distribute(processing_mode=service.ShardingPolicy.DYNAMIC, service=dispatcher.target)
        )
        assert served.element_spec == dataset.element_spec
        assert served.class_names == dataset.class_names
        wanted = {
            int(label): image
            for images, labels in dataset
            for image, label in zip(images, labels, strict=True)
        }
        for _ in range(2):
            found = [
                (int(n), image) for images, labels in served for n, image in zip(labels, images, strict=True)
            ]
            assert sorted(n for n, _ in found) == list(range(_COUNT))
            for n, image in found:
                np.testing.assert_array_equal(image, wanted[n])
    finally:
        for worker in workers:
            worker._stop()
        dispatcher._stop()
