"""Resampling and nvJPEG on a GPU, as far as a machine without one can show it."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import image_steps
import numpy as np
import pytest
import torch
from array_image import ArrayImage
from hypothesis import given
from hypothesis import strategies as st
from image_steps import Crop, Flip, Operation, Resize, fold
from scripts import ran

from fastpipe.core.types import Box, Size
from fastpipe.images import gpu_batches, kernels
from fastpipe.images.gpu_batches import NvJpegDecoder, resample_by_torch, tables_of
from fastpipe.images.pixels import Resampling, render, resampling_of

MODES = [
    kernels.BOX, kernels.BILINEAR, kernels.HAMMING, kernels.BICUBIC, kernels.LANCZOS, kernels.TORCH_BILINEAR,
    kernels.TORCH_BICUBIC, kernels.NEAREST, kernels.NEAREST_FLOOR, kernels.SHARP_BILINEAR,
    kernels.SHARP_BICUBIC,
]  # fmt: skip
OUT = Size(7, 9)


Case = tuple[ArrayImage, list[Operation]]


def case_of(seed: int, mode: int, order: int) -> Case:
    """An image, and a chain of operations that makes one of the size ``OUT`` of it."""
    rng = np.random.default_rng(seed)
    size = Size(*rng.integers(1, 41, 2).tolist())
    if order and seed % 2:  # which begins with the columns of images that are so tall
        size = Size(40, size.width % 12 + 1)
    inner = Size(*(int(rng.integers(1, side + 1)) for side in size))
    top, left = (int(rng.integers(side - part + 1)) for side, part in zip(size, inner, strict=True))
    more = Size(*(side + int(rng.integers(6)) for side in OUT))
    down, right = (int(rng.integers(side - part + 1)) for side, part in zip(more, OUT, strict=True))
    turns = (rng.random(4) < 0.5).tolist()
    return ArrayImage(rng.integers(0, 256, (*size, 3), np.uint8)), [
        Crop(Box(top, left, *inner)), Flip(*turns[:2]), Resize(more, mode, order), Flip(*turns[2:]),
        Crop(Box(down, right, *OUT)),
    ]  # fmt: skip


CASES = st.builds(case_of, st.integers(0, 2**32), st.sampled_from(MODES), st.sampled_from([0, 1]))


def on_host(image: ArrayImage, operations: Sequence[Operation]) -> torch.Tensor:
    """What the CPU's kernels make of it: (3, H, W)."""
    return torch.from_numpy(render(image, fold(operations, image.size))).permute(2, 0, 1)  # type: ignore[arg-type]


def source_of(image: ArrayImage, operations: Sequence[Operation]) -> tuple[torch.Tensor, Resampling]:
    """The pixels that are needed, and how they are resampled."""
    how = resampling_of(image, fold(operations, image.size))  # type: ignore[arg-type]
    assert how is not None
    return torch.from_numpy(image.region(how.part)), how


@given(st.lists(CASES, min_size=1, max_size=3))
def test_torchs_operations_make_the_same_bytes(cases: list[Case]) -> None:
    sources, hows = zip(*(source_of(*case) for case in cases), strict=True)
    for layout in (torch.contiguous_format, torch.channels_last):
        out = torch.empty((len(cases), 3, *OUT), dtype=torch.uint8, memory_format=layout)
        resample_by_torch(sources, tables_of(hows), out)
        for made, case in zip(out, cases, strict=True):
            assert torch.equal(made, on_host(*case))


# Triton's interpreter is chosen by the environment before it is loaded, so it has a process of its own.
INTERPRETED = """
import sys
import torch
sys.path[:0] = sys.argv[1:]
from test_gpu_batches import OUT, cases_for_triton, on_host, source_of
from fastpipe.images.gpu_batches import resample_by_triton, tables_of
cases = cases_for_triton()
sources, hows = zip(*(source_of(*case) for case in cases), strict=True)
out = torch.empty((len(cases), 3, *OUT), dtype=torch.uint8)
resample_by_triton(sources, tables_of(hows), out)
for made, case in zip(out, cases, strict=True):
    assert torch.equal(made, on_host(*case)), case[1]
print(len(cases), "are the same")
"""


def cases_for_triton() -> list[Case]:
    """All filters, both orders."""
    return [case_of(seed, mode, order) for seed, mode in enumerate(MODES) for order in (0, 1)]


# As is the environment for Triton's compiler.
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


def _output_of(script: str, *arguments: str) -> str:
    pytest.importorskip("triton", reason="the kernel is Triton's: pip install triton")
    done = ran("-c", script, *arguments, timeout=170)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_tritons_kernel_makes_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    folders = os.path.dirname(__file__), os.path.dirname(image_steps.__file__)
    assert _output_of(INTERPRETED, *folders) == f"{2 * len(MODES)} are the same\n"


def test_tritons_kernel_compiles_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert _output_of(COMPILED).split() == ["True"] * 3


@pytest.mark.gpu
@pytest.mark.parametrize("by", ["torch", "triton"])
def test_a_gpu_makes_the_same_bytes(by: str) -> None:
    resample = getattr(gpu_batches, f"resample_by_{by}")
    cases = cases_for_triton()
    sources, hows = zip(*(source_of(*case) for case in cases), strict=True)
    out = torch.empty((len(cases), 3, *OUT), dtype=torch.uint8, device="cuda")
    resample([source.cuda() for source in sources], tables_of(hows), out)
    for made, case in zip(out.cpu(), cases, strict=True):
        assert torch.equal(made, on_host(*case))


# nvImageCodec, with a library instead of it that remembers its calls.

STREAM = SimpleNamespace(cuda_stream=7)


class Codec:
    """As much of nvImageCodec as is called.  An image's pixels have a number's value, its file's length."""

    BackendKind = SimpleNamespace(HW_GPU_ONLY="engines", GPU_ONLY="kernels", HYBRID_CPU_GPU="both")
    ColorSpec = SimpleNamespace(SRGB="srgb")
    __version__ = "0.9.0"

    def __init__(self, has_engines: bool, *, says_so: bool = True) -> None:
        self.has_engines, self.says_so = has_engines, says_so
        self.made: list[dict[str, Any]] = []
        self.inside, self.most = 0, 0
        self.gate = threading.Event()
        self.gate.set()
        self._lock = threading.Lock()

    def DecodeParams(self, **options: Any) -> Any:
        return options

    def Backend(self, kind: str) -> str:
        return kind

    def CodeStream(self, blob: bytes) -> bytes:
        if not blob:
            raise RuntimeError("cannot be parsed")
        return blob

    def Decoder(self, **options: Any) -> Any:
        is_of_engines = options["backends"] == ["engines"]
        if is_of_engines and not self.has_engines and self.says_so:
            raise RuntimeError("Could not create decoder")
        self.made.append(options)
        declines = is_of_engines and not self.has_engines

        def decode(streams: Any, params: Any, cuda_stream: int = 0) -> Any:
            with self._lock:
                self.inside += 1
                self.most = max(self.most, self.inside)
            self.gate.wait(20)
            with self._lock:
                self.inside -= 1
            if isinstance(streams, bytes):
                return None if declines else object()
            assert cuda_stream == STREAM.cuda_stream
            return [None if blob == b"progressive" else Pixels(len(blob)) for blob in streams]

        return SimpleNamespace(decode=decode)


class Pixels:
    def __init__(self, value: int) -> None:
        self._pixels = torch.full((9, 8, 3), value, dtype=torch.uint8)

    def to_dlpack(self, cuda_stream: int) -> Any:
        assert cuda_stream == STREAM.cuda_stream
        return self._pixels.__dlpack__()


def decoder_of(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> NvJpegDecoder:
    monkeypatch.setattr(gpu_batches, "_require_nvimgcodec", lambda: codec)
    return NvJpegDecoder(torch.device("cuda", 0), 5)


@pytest.mark.parametrize(("has_engines", "says_so"), [(True, True), (False, True), (False, False)])
def test_engines_decode_alone(monkeypatch: pytest.MonkeyPatch, has_engines: bool, says_so: bool) -> None:
    codec = Codec(has_engines, says_so=says_so)
    decoder = decoder_of(codec, monkeypatch)
    assert decoder.has_engines == has_engines
    asked = codec.made[-2:]
    kinds = ["engines"] if has_engines else ["kernels", "both"]
    assert [made["backends"] for made in asked] == [kinds] * 2
    assert [made["max_num_cpu_threads"] for made in asked] == [2 if has_engines else 5] * 2
    assert ("by its engines" if has_engines else "by its kernels") in decoder.describe()


def test_parts_are_decoded_and_declined_files_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = decoder_of(Codec(True), monkeypatch)
    box = Box(2, 3, 4, 5)
    found = decoder.decode([(b"abc", box), (b"", box), (b"progressive", box), (b"abcd", box)], STREAM)
    assert [None if one is None else (tuple(one.shape), int(one.max())) for one in found] == [
        ((4, 5, 3), 3), None, None, ((4, 5, 3), 4),
    ]  # fmt: skip


@pytest.mark.hang_after(60)
def test_two_batches_are_decoded_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = Codec(True)
    decoder = decoder_of(codec, monkeypatch)
    codec.gate.clear()
    with ThreadPoolExecutor(5) as pool:
        made = [pool.submit(decoder.decode, [(b"abc", Box(0, 0, 9, 8))], STREAM) for _ in range(5)]
        while codec.inside < 2:
            threading.Event().wait(0.001)
        codec.gate.set()
    assert codec.most == 2 and all(one is not None for job in made for one in job.result())
