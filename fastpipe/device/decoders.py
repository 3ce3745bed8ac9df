"""Which decoder decodes on a device."""

from __future__ import annotations

from typing import Any, Literal

from fastpipe._extras import require
from fastpipe.device.making import DeviceDecoder
from fastpipe.device.nvjpeg import NvJpegDecoder
from fastpipe.images.dali import DaliDecoder
from fastpipe.options import Decode

__all__ = ["device_decoder", "share_of"]


def share_of(decode: Decode) -> float | Literal["auto"]:
    """Which part of each batch is to be decoded on a device.

    >>> share_of(Decode()), share_of(Decode("dali")), share_of(Decode(gpu_share="auto"))
    (0.0, 1.0, 'auto')
    """
    if decode.gpu_share is None:
        return 1.0 if decode.backend in ("nvimgcodec", "dali") else 0.0
    return decode.gpu_share


def device_decoder(decode: Decode, device: Any, threads: int) -> DeviceDecoder | None:
    """What decodes on a device; None where images are decoded on the CPU.

    Args:
        decode: the options; only where they name a back end or a share is decoded elsewhere, as pixels differ
            there.
        device: a ``torch.device``.
        threads: for what of decoding is done on the CPU.
    """
    if device.type != "cuda" or not share_of(decode) or decode.scaled:
        return None
    if decode.backend != "dali":
        return NvJpegDecoder(device, threads)
    torch = require("torch", extra="torch")
    index = torch.cuda.current_device() if device.index is None else device.index
    return DaliDecoder(threads, index, torch.from_dlpack)
