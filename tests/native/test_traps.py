"""Beside other libraries: whatever was imported before or after, however, and whatever it did to the process.

docs/design/native-traps.md says which test guards against what.
"""

from __future__ import annotations

import importlib.util
import itertools
import shutil
import subprocess
from pathlib import Path

import pytest
from scripts import ran

from fastpipe.bench.synthetic import photo_tree
from fastpipe.core.native import native

# How each decodes a JPEG: with its own libjpeg, in the same process.
OTHERS = {
    "PIL.Image": ("pillow", "np.asarray(PIL.Image.open(io.BytesIO(data)).convert('RGB'))"),
    "torchvision.io": (
        "torchvision",
        "torchvision.io.decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8)).permute(1, 2, 0).numpy()",
    ),
    "simplejpeg": ("simplejpeg", "simplejpeg.decode_jpeg(data)"),
    "cv2": ("opencv-python-headless", "cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)[..., ::-1]"),
    "tensorflow": ("tensorflow-cpu", "tensorflow.io.decode_jpeg(data).numpy()"),
    "nvidia.dali": ("nvidia-dali-cuda130", "None"),
}  # fmt: skip
SCRIPT = """
import ctypes, glob, importlib, io, os, sys
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import numpy as np
how, names, decoders = {how!r}, {names!r}, {decoders!r}
if how != "as usual":
    sys.setdlopenflags(os.RTLD_NOW | os.RTLD_GLOBAL)
    import PIL
    for path in glob.glob(os.path.join(os.path.dirname(PIL.__file__), "..", "pillow.libs", "*")):
        if "jpeg" in path or "libz" in path:
            ctypes.CDLL(path, os.RTLD_NOW | os.RTLD_GLOBAL)  # its functions come first for all that follows
for name in names:
    globals()[name.partition(".")[0]] = importlib.import_module(name.partition(".")[0])
    importlib.import_module(name)
import PIL.Image, torch
from fastpipe.core.native import native
pixels = np.random.default_rng(0).integers(0, 256, (5, 6, 3), np.uint8).repeat(16, 0).repeat(16, 1)
for options in ({{}}, {{"progressive": True}}, {{"subsampling": 0}}):
    file = io.BytesIO()
    PIL.Image.fromarray(pixels).save(file, "JPEG", quality=90, **options)
    data = file.getvalue()
    expected = np.asarray(PIL.Image.open(io.BytesIO(data)).convert("RGB"))
    for _ in range(2):
        assert np.array_equal(native.decode(data, 0, 0, 80, 96), expected)
        assert np.array_equal(native.decode(data, 7, 9, 50, 60), expected[7:57, 9:69])
        assert native.decode(data[:500], 0, 0, 80, 96) is None
        for name, decoder in decoders.items():
            made = eval(decoder)
            assert made is None or np.abs(made.astype(int) - expected).mean() < 3, name
print("good")
"""


def decode_beside(names: list[str], how: str = "as usual") -> None:
    decoders = {name: OTHERS[name][1] for name in names if name in OTHERS}
    script = SCRIPT.format(how=how, names=names, decoders=decoders)
    done = ran("-c", script)
    assert done.stdout == "good\n", done.stderr[-3000:]


def installed() -> list[str]:
    return [name for name in OTHERS if is_installed(name)]


def is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # nor is the package that it would be in
        return False


@pytest.mark.few(1)
@pytest.mark.parametrize("is_first", [True, False], ids=["first", "last"])
@pytest.mark.parametrize("name", OTHERS)
def test_decoding_beside_another_library(name: str, is_first: bool) -> None:
    if name not in installed():
        pytest.skip(f"pip install {OTHERS[name][0]}")
    decode_beside(["fastpipe", name] if is_first else [name, "fastpipe"])


@pytest.mark.slow
@pytest.mark.parametrize("how", ["as usual", "with all names in common"])
@pytest.mark.parametrize("reverse", [False, True], ids=["first", "last"])
def test_decoding_beside_all_of_them(how: str, reverse: bool) -> None:
    # TensorFlow and torch bring functions of one name that they must not share: they are not loaded so themselves.
    names = [name for name in installed() if how == "as usual" or name not in ("tensorflow", "nvidia.dali")]
    decode_beside(["fastpipe", *names] if reverse else [*names, "fastpipe"], how)


@pytest.mark.slow
def test_decoding_after_every_order_of_imports() -> None:
    names = [name for name in ("PIL.Image", "torchvision.io", "simplejpeg", "cv2") if name in installed()]
    for order in itertools.permutations(["fastpipe", *names]):
        decode_beside([*order])


@pytest.mark.skipif(shutil.which("nm") is None, reason="apt-get install binutils")
def test_no_function_of_a_codec_is_another_library_s() -> None:
    """The libraries that decode are part of the module, which has no zlib and no OpenMP."""
    command = ["nm", "-D", "--undefined-only", native.__file__]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    names = [line.split()[-1].lower() for line in done.stdout.splitlines()]
    assert len(names) > 50
    if any(name.startswith(("jpeg_", "libdeflate_", "zstd_", "lz4_")) for name in names):
        pytest.skip("install the static libraries that `make compiler` names, and `make native`")
    assert not [name for name in names if name.startswith(("inflate", "deflate", "zstd", "omp_", "gomp"))]


FLOATS = """
import ctypes, sys, threading
import numpy as np
import torch
from torchvision import transforms as v1
flushes, tree = sys.argv[1] == "flushes", sys.argv[2]
assert torch.set_flush_denormal(flushes)
from fastpipe import Decode, FastImageFolder, FastLoader
TRANSFORMS = [
    v1.Compose([v1.RandomResizedCrop(32), v1.RandomHorizontalFlip(), v1.ToTensor(), v1.Normalize([0.4] * 3, [0.2] * 3)]),
    v1.Compose([v1.Resize(40), v1.CenterCrop(32), v1.ToTensor()]),
]
total = 0
for threads in (2, 0):
    for transform in TRANSFORMS:
        dataset = FastImageFolder(tree, transform, cache="off", seed=3, **({"threads": threads} if threads else {}))
        for images, _ in FastLoader(dataset, batch_size=4, shuffle=True, seed=1):
            total = (total * 31 + int(images.numpy().view(np.uint32).astype(np.uint64).sum())) % 2**61
# The script's own state is what it was.
is_flushed = float(torch.tensor([1e-40]) * 1) == 0
assert is_flushed == flushes, is_flushed
print(total)
"""


@pytest.mark.slow
def test_small_numbers_that_are_flushed_change_no_value(tmp_path: Path) -> None:
    """Another library switches flush-to-zero on in the script's thread, from which others inherit it."""
    tree = photo_tree(tmp_path, classes=2, per_class=8, sizes=(90, 140))
    flushed, usual = (ran("-c", FLOATS, how, tree) for how in ("flushes", "does not"))
    assert flushed.returncode == usual.returncode == 0, (flushed.stderr, usual.stderr)
    assert flushed.stdout == usual.stdout
