"""The rows that decode with other libraries, each in a process of its own."""

from __future__ import annotations

from dataclasses import replace

from fastpipe.bench.data import Photos
from fastpipe.bench.peers import Peer, PeerRow
from fastpipe.bench.results import RowInfo

__all__ = ["DecodingPeerRow", "decoding_peers", "row_info"]


def decoding_peers(device: str) -> tuple[Peer, ...]:
    """Who decodes photos there, and crops, resizes and mirrors them there.

    Args:
        device: ``"cuda"`` or ``"cpu"``.
    """
    is_on_gpu = device == "cuda"
    crops = f"whole photos are decoded{' there' if is_on_gpu else ''}; torchvision v2's crop, image by image"

    def of_torch(library: str, module: str, install: str) -> Peer:
        label = f'{module}decode_jpeg(device="{device}")'
        return Peer(
            f"decode-{library}", label, "torch_decode", install, library, output="uint8", note=crops,
            options={"library": library, "device": device}, is_on_gpu=is_on_gpu,
        )  # fmt: skip

    return (
        of_torch("torchvision", "torchvision.io.", "pip install torchvision"),
        of_torch("torchcodec", "torchcodec.decoders.", "pip install 'torchcodec>=0.16'"),
        Peer(
            "decode-dali-own", "DALI, mixed pipeline" if is_on_gpu else "DALI, CPU pipeline", "dali",
            "pip install nvidia-dali-cuda130", "nvidia.dali", output="uint8",
            note="own crops and resampling", options={"device": device}, is_on_gpu=is_on_gpu,
        ),
    )  # fmt: skip


def row_info(peer: Peer, section: str) -> RowInfo:
    """What the report calls a peer's row, before it is started."""
    return RowInfo(peer.key, peer.label, "peer", None, peer.output, peer.note, section=section, unit="images")


class DecodingPeerRow(PeerRow):
    """A peer that decodes photos; arguments as of `PeerRow`.

    Args:
        section: of its row.
    """

    def __init__(
        self, peer: Peer, python: str, photos: Photos, batch_size: int, threads: int, side: int, section: str
    ) -> None:
        super().__init__(peer, python, photos, batch_size, threads, side)
        self.chunk, self._section = batch_size, section  # what a GPU makes does not come in bursts

    def info(self) -> RowInfo:
        """The row, with what the child told."""
        return replace(super().info(), section=self._section, unit="images")
