"""One worker of a ``MultiWorkerMirroredStrategy``: what it sees, and what a loop of steps makes of it."""

from __future__ import annotations

import json
import os
import sys

rank, ports, how, folder = int(sys.argv[1]), sys.argv[2].split(","), sys.argv[3], sys.argv[4]
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["TF_CONFIG"] = json.dumps(
    {
        "cluster": {"worker": [f"127.0.0.1:{port}" for port in ports]},
        "task": {"type": "worker", "index": rank},
    }
)

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

strategy = tf.distribute.MultiWorkerMirroredStrategy()  # before anything else of TensorFlow runs

import fastpipe.tf  # noqa: E402

COUNT, BATCH = 25, 8
files = sorted(os.path.join(folder, name) for name in os.listdir(folder))
table = {"file": [files[n % len(files)] for n in range(COUNT)], "number": np.arange(COUNT)}
options = {"image_size": 8, "seed": 3, "augment": fastpipe.tf.Augment(horizontal_flip=0.5)}
if how == "graph":
    options |= {"engine": "graph", "parity": "tf"}
if how in ("auto", "shard of graph"):
    options |= {"shard": "auto"}
    options |= {"engine": "graph", "parity": "tf"} if how == "shard of graph" else {}

if how == "from function":
    distributed = strategy.distribute_datasets_from_function(
        lambda context: fastpipe.tf.image_dataset(
            table, "number", shard=context, batch_size=context.get_per_replica_batch_size(BATCH), **options
        )
    )
    dataset = None
else:
    dataset = fastpipe.tf.image_dataset(table, "number", batch_size=BATCH, **options)
    distributed = strategy.experimental_distribute_dataset(dataset)


@tf.function
def step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
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
decoded = 0 if dataset is None else len(dataset)
print(json.dumps({"rank": rank, "epochs": epochs, "batches": decoded}), flush=True)
