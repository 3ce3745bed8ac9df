"""Check the fastpipe that is installed in this environment; ``make wheel-check`` and cibuildwheel run it.

It needs Pillow beside fastpipe, but neither pytest nor torch.
"""

from __future__ import annotations

import importlib.metadata
import io
import sys
import sysconfig
from pathlib import Path

import numpy as np

from fastpipe import Decode
from fastpipe.core.native import native

ROWS, COLUMNS, SAMPLES = 60, 75, 64


def check_module() -> None:
    """Check that the module is the installed one and refers to no decoder of the system."""
    module = Path(native.__file__)
    assert module.is_relative_to(sysconfig.get_path("platlib")), f"{module} is not in this environment"
    # Pillow, which brings a libjpeg of its own, is not imported yet.
    loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line}
    decoders = ("libjpeg", "libdeflate", "libzstd", "liblz4")
    foreign = [
        path
        for path in loaded
        if Path(path).name.startswith(decoders) and not Path(path).is_relative_to(sys.prefix)
    ]
    assert not foreign, f"{module} needs {foreign}"
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        assert not sys._is_gil_enabled(), "loading the native core has enabled Python's lock"


def check_licences() -> None:
    """Check that the licences of what the wheel contains are in it."""
    names = {path.name for path in importlib.metadata.files("fastpipe") or () if "licenses" in path.parts}
    needed = {
        "LICENSE",
        *(f"{name}.txt" for name in ("libdeflate", "libjpeg-turbo", "lz4", "nanobind", "zstd")),
    }
    assert names >= needed, f"licences in the wheel: {names}"


def check_decoding() -> None:
    """Compare decoded JPEGs with Pillow's: of every kind that the core decodes, and many at once in its threads."""
    from PIL import Image

    from fastpipe.core.types import Box
    from fastpipe.images.reader import ImageReader

    noise = np.random.default_rng(0).integers(0, 256, (ROWS, COLUMNS, 3), np.uint8)
    encoded = io.BytesIO()
    Image.fromarray(noise).save(encoded, "JPEG", subsampling=2)
    blob, expected = encoded.getvalue(), np.asarray(Image.open(encoded))

    reader = ImageReader(Decode())
    assert reader.is_native, "the native core and Pillow decode differently"
    part = reader.open(blob, "noise.jpg").region(Box(17, 9, 31, 50))
    assert np.array_equal(part, expected[17:48, 9:59]), "a part of a JPEG differs from Pillow's"

    statuses, memory = np.zeros((SAMPLES, 8), np.uint8), np.zeros((SAMPLES, *expected.shape), np.uint8)
    nothing = np.zeros(SAMPLES, np.int64)
    as_it_is = native.conversion(0, 3, True, 1, True, [], [], b"")
    batch = native.image_batch(
        native.ImagePlan([], as_it_is, 0), b"", b"", nothing, nothing, np.zeros((SAMPLES, 0)), memory.reshape(-1),
        np.arange(SAMPLES) * expected.size, expected.shape[:2], False, statuses, [blob] * SAMPLES,
    )  # fmt: skip
    number, event = native.submit(batch, native.Channel(4), 4), (0, 0)
    while event != (number, 2):
        event = native.next_event(10_000)
    assert (statuses[:, 0] == 1).all() and (memory == expected).all(), "a batch differs from Pillow's pixels"
    assert native.stop(10_000), "the native core's threads do not end"


def main() -> None:
    check_module()
    check_licences()
    check_decoding()
    version = ".".join(map(str, sys.version_info[:3]))
    print(f"fastpipe {importlib.metadata.version('fastpipe')} decodes as Pillow, with Python {version}")


if __name__ == "__main__":
    main()
