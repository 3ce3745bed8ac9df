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


@pytest.mark.parametrize("engine", ["threads", "graph"])
def test_replicas_share_each_batch(
    engine: str, numbered: dict[str, Any], two_replicas: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    distributed = two_replicas.experimental_distribute_dataset(_dataset(numbered, engine))
    orders = []
    for _ in range(2):
        steps = [
            [one.numpy().tolist() for one in two_replicas.experimental_local_results(labels)]
            for _, labels in distributed
        ]
        # The global batch is batch_size, of which each replica has a half.
        assert [[len(one) for one in step] for step in steps] == [[4, 4], [4, 4], [4, 4], [1, 0]]
        orders.append(sum((one for step in steps for one in step), []))
        assert sorted(orders[-1]) == list(range(_COUNT))
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
        layers = [keras.Input((8, 8, 3)), Counted(), keras.layers.Flatten(), keras.layers.Dense(_COUNT)]
        model = keras.Sequential(layers)
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    history = model.fit(_dataset(numbered, engine, rescale=1 / 255), epochs=2, verbose=0, shuffle=False)
    assert np.isfinite(history.history["loss"]).all()
    assert sum(counts) == 2 * _COUNT


@pytest.mark.slow
@pytest.mark.parametrize("how", ["plain", "auto", "graph", "shard of graph", "from function"])
def test_two_workers_share_an_epoch(how: str, photo_table: Any, tmp_path: Path) -> None:
    for number, path in enumerate(photo_table.paths[:5]):
        os.symlink(path, tmp_path / f"{number}{Path(path).suffix}")
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as second:
        ports = f"{first.getsockname()[1]},{second.getsockname()[1]}"
    script = Path(__file__).with_name("worker_script.py")
    workers = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), ports, how, str(tmp_path)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        said = [worker.communicate(timeout=150) for worker in workers]
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


def _config(monkeypatch: pytest.MonkeyPatch, task: str, index: int, **jobs: int) -> None:
    cluster = {job: [f"127.0.0.1:{n}" for n in range(1, count + 1)] for job, count in jobs.items()}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": task, "index": index}}))


def test_a_worker_gets_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    assert shard_of("auto", is_shuffled=True, seed=1) is None
    two, three = {"worker": 2}, {"worker": 2, "chief": 1}
    parts = [("worker", 1, two, (1, 2)), ("worker", 1, three, (2, 3)), ("chief", 0, three, (0, 3))]
    for task, index, jobs, part in parts:
        _config(monkeypatch, task, index, **jobs)
        assert shard_of("auto", is_shuffled=True, seed=1) == fastpipe.Shard(*part, "eval")
    _config(monkeypatch, "worker", 0, worker=1)
    assert shard_of("auto", is_shuffled=True, seed=1) is None
    context = tf.distribute.InputContext(3, 2, 6)
    assert shard_of(context, is_shuffled=False, seed=None) == fastpipe.Shard(2, 3, "eval")
    assert shard_of(fastpipe.Shard(1, 2), is_shuffled=True, seed=0) == fastpipe.Shard(1, 2)


def test_workers_need_one_order(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(OptionError, match="needs seed=, the same for all"):
        shard_of(fastpipe.Shard(0, 2), is_shuffled=True, seed=None)
    with pytest.raises(OptionError, match=r"a tf\.distribute\.InputContext or None, got 'all'"):
        shard_of("all", is_shuffled=True, seed=1)
    _config(monkeypatch, "ps", 0, worker=2, ps=1)
    with pytest.raises(OptionError, match="its task is 'ps'"):
        shard_of("auto", is_shuffled=True, seed=1)
    monkeypatch.delenv("TF_CONFIG")
    with caplog.at_level(logging.WARNING, "fastpipe.tf"):
        assert shard_of(None, is_shuffled=True, seed=None) is None
        _config(monkeypatch, "worker", 0, worker=2)
        assert shard_of(None, is_shuffled=True, seed=1) is None
        assert shard_of(None, is_shuffled=False, seed=None) is None
        assert not caplog.records
        assert shard_of(None, is_shuffled=True, seed=None) is None
        assert "pass the same to all" in caplog.text


@pytest.mark.leaks("servers of TensorFlow keep threads to the end of the process")
def test_the_data_service_serves_each_sample_once(numbered: dict[str, Any]) -> None:
    service = tf.data.experimental.service
    dispatcher = service.DispatchServer()
    address = dispatcher.target.split("://")[1]
    workers = [service.WorkerServer(service.WorkerConfig(dispatcher_address=address)) for _ in range(2)]
    try:
        dataset = _dataset(numbered, "graph")
        served = dataset.apply(service.distribute(service.ShardingPolicy.DYNAMIC, dispatcher.target))
        assert (served.element_spec, served.class_names) == (dataset.element_spec, dataset.class_names)
        wanted = {int(label): image for image, label in dataset.unbatch()}
        for _ in range(2):
            found = [(int(label), image) for image, label in served.unbatch()]
            assert sorted(n for n, _ in found) == list(range(_COUNT))
            for n, image in found:
                np.testing.assert_array_equal(image, wanted[n])
    finally:
        for worker in workers:
            worker._stop()
        dispatcher._stop()
