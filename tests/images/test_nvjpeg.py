"""nvImageCodec on a GPU, with a library in its place that says what it was asked for."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastpipe.core.types import Box
from fastpipe.images import gpu_batches as nvjpeg
from fastpipe.images.gpu_batches import NvJpegDecoder

STREAM = SimpleNamespace(cuda_stream=7)


class Codec:
    """As much of nvImageCodec as is called.  An image's pixels are a number, its file's length."""

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
            return [None if blob == b"progressive" else Image(len(blob)) for blob in streams]

        return SimpleNamespace(decode=decode)


class Image:
    def __init__(self, value: int) -> None:
        self._pixels = torch.full((9, 8, 3), value, dtype=torch.uint8)

    def to_dlpack(self, cuda_stream: int) -> Any:
        assert cuda_stream == STREAM.cuda_stream
        return self._pixels.__dlpack__()


def decoder_of(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> NvJpegDecoder:
    monkeypatch.setattr(nvjpeg, "_require_nvimgcodec", lambda: codec)
    return NvJpegDecoder(torch.device("cuda", 0), 5)


@pytest.mark.parametrize(("has_engines", "says_so"), [(True, True), (False, True), (False, False)])
def test_engines_alone_where_there_are_any(
    monkeypatch: pytest.MonkeyPatch, has_engines: bool, says_so: bool
) -> None:
    codec = Codec(has_engines, says_so=says_so)
    decoder = decoder_of(codec, monkeypatch)
    assert decoder.has_engines == has_engines
    asked = codec.made[-2:]
    kinds = ["engines"] if has_engines else ["kernels", "both"]
    assert [made["backends"] for made in asked] == [kinds] * 2
    assert [made["max_num_cpu_threads"] for made in asked] == [2 if has_engines else 5] * 2
    assert ("by its engines" if has_engines else "by its kernels") in decoder.describe()


def test_parts_and_what_is_declined(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = decoder_of(Codec(True), monkeypatch)
    box = Box(2, 3, 4, 5)
    found = decoder.decode([(b"abc", box), (b"", box), (b"progressive", box), (b"abcd", box)], STREAM)
    assert [None if one is None else (tuple(one.shape), int(one.max())) for one in found] == [
        ((4, 5, 3), 3), None, None, ((4, 5, 3), 4),
    ]  # fmt: skip


@pytest.mark.hang_after(60)
def test_two_batches_at_once_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = Codec(True)
    decoder = decoder_of(codec, monkeypatch)
    codec.gate.clear()
    found: list[Any] = []
    threads = [
        threading.Thread(target=lambda: found.extend(decoder.decode([(b"abc", Box(0, 0, 9, 8))], STREAM)))
        for _ in range(5)
    ]
    for thread in threads:
        thread.start()
    while codec.inside < 2:
        threading.Event().wait(0.001)
    codec.gate.set()
    for thread in threads:
        thread.join()
    assert codec.most == 2 and len(found) == 5 and all(one is not None for one in found)


def test_an_error_gives_the_decoder_back(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = decoder_of(Codec(True), monkeypatch)
    for _ in range(5):
        with pytest.raises(AssertionError):
            decoder.decode([(b"abc", Box(0, 0, 9, 8))], SimpleNamespace(cuda_stream=8))
    assert decoder.decode([(b"abc", Box(0, 0, 9, 8))], STREAM)[0] is not None
