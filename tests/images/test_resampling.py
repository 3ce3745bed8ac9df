"""Resampling of images that are on a device: the CPU's kernels' bytes, by torch's operations and by Triton."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from array_image import ArrayImage
from hypothesis import given
from hypothesis import strategies as st
from image_steps import Crop, Flip, Grey, Operation, Resize, fold

from fastpipe.core.types import Box, Size
from fastpipe.images import kernels
from fastpipe.images.gpu_batches import resample_by_torch, tables_of
from fastpipe.images.pixels import Resampling, render, resampling_of

MODES = [
    kernels.BOX, kernels.BILINEAR, kernels.HAMMING, kernels.BICUBIC, kernels.LANCZOS, kernels.TORCH_BILINEAR,
    kernels.TORCH_BICUBIC, kernels.NEAREST, kernels.NEAREST_FLOOR, kernels.SHARP_BILINEAR,
    kernels.SHARP_BICUBIC,
]  # fmt: skip
OUT = Size(7, 9)


@st.composite
def chains(draw: Any) -> tuple[ArrayImage, list[Operation]]:
    """An image, and a chain of operations that makes one of the size ``OUT`` of it."""
    height, width = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    image = ArrayImage(rng.integers(0, 256, (height, width, 3), np.uint8))
    box = Box(0, 0, height, width)
    operations: list[Operation] = []
    if draw(st.booleans()):
        inner = Size(draw(st.integers(1, height)), draw(st.integers(1, width)))
        top, left = draw(st.integers(0, height - inner.height)), draw(st.integers(0, width - inner.width))
        box = Box(top, left, *inner)
        operations.append(Crop(box))
    if draw(st.booleans()):
        operations.append(Flip(draw(st.booleans()), draw(st.booleans())))
    more = Size(OUT.height + draw(st.integers(0, 5)), OUT.width + draw(st.integers(0, 5)))
    operations.append(Resize(more, draw(st.sampled_from(MODES)), draw(st.sampled_from([0, 1]))))
    if draw(st.booleans()):
        operations.append(Flip(draw(st.booleans()), draw(st.booleans())))
    top = draw(st.integers(0, more.height - OUT.height))
    operations.append(Crop(Box(top, draw(st.integers(0, more.width - OUT.width)), *OUT)))
    return image, operations


def on_host(image: ArrayImage, operations: Sequence[Operation]) -> torch.Tensor:
    """What the CPU's kernels make of it: (3, H, W)."""
    region = fold(operations, image.size)
    assert region is not None
    return torch.from_numpy(render(image, region)).permute(2, 0, 1)


def source_of(image: ArrayImage, operations: Sequence[Operation]) -> tuple[torch.Tensor, Resampling]:
    """The pixels that are needed, and how they are resampled."""
    region = fold(operations, image.size)
    assert region is not None
    how = resampling_of(image, region)
    assert how is not None
    return torch.from_numpy(image.region(how.part)), how


@given(st.lists(chains(), min_size=1, max_size=3))
def test_torchs_operations_make_the_same_bytes(cases: list[tuple[ArrayImage, list[Operation]]]) -> None:
    sources, hows = zip(*(source_of(*case) for case in cases), strict=True)
    for layout in (torch.contiguous_format, torch.channels_last):
        out = torch.empty((len(cases), 3, *OUT), dtype=torch.uint8, memory_format=layout)
        resample_by_torch(sources, tables_of(hows), out)
        for made, case in zip(out, cases, strict=True):
            assert torch.equal(made, on_host(*case))


def test_what_is_more_than_resampling_is_not_described() -> None:
    image = ArrayImage(np.zeros((20, 30, 3), np.uint8))
    resize = Resize(OUT, kernels.BILINEAR)
    for operations in ([Crop(Box(-1, 0, 20, 30)), resize], [Grey(3), resize], [resize, Grey(3)]):
        region = fold(operations, image.size)
        assert region is not None and resampling_of(image, region) is None
    region = fold([Crop(Box(2, 3, 9, 9)), resize], image.size)
    assert region is not None
    how = resampling_of(image, region)
    assert how is not None and how.part == Box(2, 3, 9, 9)


# Triton's interpreter is chosen by the environment before it is loaded, so it has a process of its own.
INTERPRETED = """
import sys
import numpy as np
import torch
sys.path.insert(0, sys.argv[1])
from test_resampling import OUT, cases_for_triton, on_host, source_of
from fastpipe.images.gpu_batches import tables_of
from fastpipe.images.gpu_batches import resample_by_triton
cases = cases_for_triton()
sources, hows = zip(*(source_of(*case) for case in cases), strict=True)
out = torch.empty((len(cases), 3, *OUT), dtype=torch.uint8)
resample_by_triton(sources, tables_of(hows), out)
for made, case in zip(out, cases, strict=True):
    assert torch.equal(made, on_host(*case)), case[1]
print(len(cases), "are the same")
"""


def cases_for_triton() -> list[tuple[ArrayImage, list[Operation]]]:
    """All filters, both orders, mirrored and not; larger and smaller than the output."""
    rng, found = np.random.default_rng(0), []
    for number, mode in enumerate(MODES):
        for order in (0, 1):
            size = Size(*(int(side) for side in rng.integers(1, 24, 2)))
            if order:  # which begins with the columns of images that are so tall
                size = Size(40, size.width % 12 + 1)
            image = ArrayImage(rng.integers(0, 256, (*size, 3), np.uint8))
            inner = Size(max(1, size.height - 2), max(1, size.width - 3))
            found.append((image, [
                Crop(Box(size.height - inner.height, 0, *inner)), Flip(number % 2 == 0, number % 3 == 0),
                Resize(Size(OUT.height + 2, OUT.width + 1), mode, order), Crop(Box(1, 1, *OUT)),
                Flip(order == 1, number % 4 == 0),
            ]))  # fmt: skip
    return found


@pytest.mark.slow
def test_tritons_kernel_makes_the_same_bytes() -> None:
    pytest.importorskip("triton", reason="the kernel is Triton's: pip install triton")
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED, os.path.dirname(__file__)], capture_output=True, text=True,
        timeout=170, check=False, env={**os.environ, "TRITON_INTERPRET": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == f"{2 * len(MODES)} are the same\n"


# In a process of its own, as what Triton's compiler is, the environment of the test above has chosen.
COMPILED = """
import warnings
warnings.simplefilter("ignore")
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from fastpipe.images.gpu_batches import jitted
types = {"numbers": "*i64", "tables": "*i32", "out": "*u8", "columns": "constexpr", "block": "constexpr"}
signature = {name: types.get(name, "i32") for name in jitted().arg_names}
source = ASTSource(fn=jitted(), signature=signature, constexprs={"columns": 9, "block": 128})
for capability in (75, 80, 90):
    print(len(triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"]) > 0)
"""


def test_tritons_kernel_compiles_for_gpus_without_one(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="the kernel is Triton's: pip install triton")
    done = subprocess.run(
        [sys.executable, "-c", COMPILED], capture_output=True, text=True, timeout=170, check=False,
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["True"] * 3


@pytest.mark.gpu
@pytest.mark.parametrize("by", ["torch", "triton"])
def test_a_gpu_makes_the_same_bytes(by: str) -> None:
    if by == "triton":
        from fastpipe.images.gpu_batches import resample_by_triton as resample
    else:
        resample = resample_by_torch
    cases = cases_for_triton()
    sources, hows = zip(*(source_of(*case) for case in cases), strict=True)
    out = torch.empty((len(cases), 3, *OUT), dtype=torch.uint8, device="cuda")
    resample([source.cuda() for source in sources], tables_of(hows), out)
    for made, case in zip(out.cpu(), cases, strict=True):
        assert torch.equal(made, on_host(*case))
