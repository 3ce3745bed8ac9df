"""One worker of a ``MultiWorkerMirroredStrategy``: what it sees, and what a loop of steps makes of it."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

COUNT, BATCH = 25, 8


def main(rank: int, ports: list[str], how: str, folder: str) -> None:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    cluster = {"worker": [f"127.0.0.1:{port}" for port in ports]}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": rank}})

    import numpy as np
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()  # before anything else of TensorFlow runs

    import fastpipe.tf

    files = sorted(os.path.join(folder, name) for name in os.listdir(folder))
    table = {"file": [files[n % len(files)] for n in range(COUNT)], "number": np.arange(COUNT)}
    options: dict[str, Any] = {
        "image_size": 8,
        "seed": 3,
        "augment": fastpipe.tf.Augment(horizontal_flip=0.5),
    }
    if how in ("graph", "shard of graph"):
        options |= {"engine": "graph", "parity": "tf"}
    if how in ("auto", "shard of graph"):
        options |= {"shard": "auto"}

    def dataset(batch_size: int, **more: Any) -> Any:
        return fastpipe.tf.image_dataset(table, "number", batch_size=batch_size, **options, **more)

    if how == "from function":
        distributed = strategy.distribute_datasets_from_function(
            lambda context: dataset(context.get_per_replica_batch_size(BATCH), shard=context)
        )
    else:
        distributed = strategy.experimental_distribute_dataset(dataset(BATCH))

    @tf.function
    def step(images: Any, labels: Any) -> Any:
        """Rows of a step, over all replicas."""
        context = tf.distribute.get_replica_context()
        return context.all_reduce("sum", tf.shape(images)[0]), labels

    epochs = []
    for _ in range(2):
        steps, seen = [], []
        for element in distributed:
            rows, labels = strategy.run(step, args=element)
            steps.append(int(strategy.experimental_local_results(rows)[0]))
            seen += np.concatenate(strategy.experimental_local_results(labels)).tolist()
        epochs.append({"steps": steps, "seen": seen})
    print(json.dumps({"rank": rank, "epochs": epochs}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2].split(","), sys.argv[3], sys.argv[4])
