"""Processes that use TensorFlow: how they end, their memory, torch beside it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def run(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    variables = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **environment}
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=170, env=variables)


_ENDING = """
import os, signal, sys
import fastpipe
import keras

path, how, options = sys.argv[1], sys.argv[2], {}
def slow(image):
    sum(range(1 << 20))  # the epoch's thread is in Python nearly all the time
    return image

if sys.argv[3] == "code":
    options["preprocess"] = slow
elif sys.argv[3] == "DALI":
    options["decode"] = fastpipe.Decode(backend="dali")
made = fastpipe.tf.image_dataset([path] * 400, [0] * 400, image_size=8, batch_size=2, cache="off", **options)
if how == "exit":
    iterator = iter(made)
    next(iterator)
    sys.exit(7)
if how == "error":
    for _ in made:
        raise ValueError("in the middle of an epoch")
class Interrupted(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        os.kill(os.getpid(), signal.SIGINT)
model = keras.Sequential([keras.Input((8, 8, 3)), keras.layers.Flatten(), keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(made, verbose=0, callbacks=[Interrupted()])
"""


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["kernels", "code", "DALI"])
@pytest.mark.parametrize(("how", "code"), [("exit", 7), ("error", 1), ("interrupt", -signal.SIGINT)])
def test_the_interpreter_ends_within_an_epoch(photo_table: Any, how: str, code: int, kind: str) -> None:
    done = run(_ENDING, photo_table.paths[0], how, kind)
    assert done.returncode == code, done.stderr[-2000:]


_FAULTS = """
import ctypes, resource, sys
import fastpipe
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
made = fastpipe.tf.image_dataset([sys.argv[1]], None, image_size=8, cache="off")
for _ in range(2):
    for _ in made:
        pass
piece = 1 << 24  # larger than anything that is free by chance
libc.free(libc.malloc(piece))
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    memory = libc.malloc(piece)
    ctypes.memset(memory, 1, piece)
    libc.free(memory)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="glibc is asked; run it on Linux")
@pytest.mark.parametrize(
    ("tunables", "least", "most"),
    [
        ("", 0, 2 * 4096),
        # Each of the 4,096 pages of 20 pieces of memory is mapped anew, as TensorFlow's generators have it.
        pytest.param("glibc.malloc.mmap_threshold=131072", 20 * 4000, 1e9, marks=pytest.mark.slow),
    ],
    ids=["default", "environment"],
)
def test_freed_memory_is_used_again_unless_the_environment_says_otherwise(
    photo_table: Any, tunables: str, least: float, most: float
) -> None:
    done = run(_FAULTS, photo_table.paths[0], **({"GLIBC_TUNABLES": tunables} if tunables else {}))
    assert least <= int(done.stdout.splitlines()[-1]) < most, done.stderr[-2000:]


_BOTH = """
import importlib, numpy, sys
for name in sys.argv[2:]:
    importlib.import_module(name)
import fastpipe
from fastpipe import FastImageFolder, FastLoader
from torchvision.transforms import v2
root = sys.argv[1]
made = fastpipe.tf.image_dataset(root, image_size=(32, 32), shuffle=False, verbose=False, parity="pil")
batch = next(iter(made))[0].numpy()
folder = FastImageFolder(root, v2.Compose([v2.Resize((32, 32)), v2.PILToTensor()]))
image, _ = next(iter(FastLoader(folder, batch_size=len(batch))))
assert numpy.array_equal(batch, image.permute(0, 2, 3, 1).numpy())
print("same")
"""


@pytest.mark.slow
@pytest.mark.parametrize("names", [("torch", "tensorflow"), ("tensorflow", "torch")], ids=str)
def test_torch_and_tensorflow_work_in_one_process(photo_tree: Path, names: tuple[str, str]) -> None:
    done = run(_BOTH, str(photo_tree), *names)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "same"


def test_without_tensorflow_the_extra_is_named() -> None:
    done = run("import sys; sys.modules['tensorflow'] = None; import fastpipe; fastpipe.tf")
    assert "pip install '.[tf]'" in done.stderr
