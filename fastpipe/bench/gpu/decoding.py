"""The rows that decode photos to batches on the device, and the loaders that the training rows have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from fastpipe.bench.data import Photos
from fastpipe.bench.loaders import LoaderRow, LoaderSpec, train_transform, why_not_installed
from fastpipe.bench.results import RowInfo

__all__ = ["BACKENDS", "DeviceLoaderRow", "info_of", "loader_specs", "why_missing"]

Output = Literal["float32", "uint8"]
BACKENDS: tuple[Literal["nvimgcodec", "dali"], ...] = ("nvimgcodec", "dali")

_FAST = "FastImageFolder + FastLoader"


def loader_specs(section: str, device: str, cores: int, output: Output) -> list[LoaderSpec]:
    """The loaders of a section: what is replaced, fastpipe's on the processor's decoders, and on the GPU's;
    where they feed a training, also one on both.

    Args:
        section: begins their keys.
        device: where their batches are.
        cores: workers of the replaced loader.
        output: what batches hold.
    """
    stock = f"ImageFolder + DataLoader(num_workers={cores})"
    note = "" if device == "cpu" else "pin_memory=True, copied with non_blocking=True"
    there = "decoded and resampled on the GPU; pixels differ a little from Pillow's"
    return [
        LoaderSpec(f"{section}-replaced", stock, "replaced", cores, output, note, device=device),
        LoaderSpec(f"{section}-cpu", _FAST, "fastpipe", 0, output, "decoded on the processor", device=device),
        *(
            LoaderSpec(
                f"{section}-{backend}", f'{_FAST}, Decode("{backend}")', "fastpipe", 0, output, there,
                backend=backend, device=device,
            )
            for backend in BACKENDS
        ),
        *([_shared(section, device, output)] if section == "train" else []),
    ]  # fmt: skip


def _shared(section: str, device: str, output: Output) -> LoaderSpec:
    """The loader of which the GPU decodes as much as makes steps fastest."""
    note = "the GPU decodes the share of each batch with which the first steps were fastest"
    return LoaderSpec(
        f"{section}-share", f'{_FAST}, Decode("nvimgcodec", gpu_share="auto")', "fastpipe", 0, output, note,
        backend="nvimgcodec", gpu_share="auto", device=device,
    )  # fmt: skip


def info_of(spec: LoaderSpec, section: str) -> RowInfo:
    """What the report calls a loader's row."""
    return RowInfo(
        spec.key, spec.label, spec.group, spec.num_workers, spec.output, spec.note, section=section,
        unit="images",
    )  # fmt: skip


def why_missing(spec: LoaderSpec) -> str:
    """Why a back end of a GPU is not measured; empty where it is. Nothing is imported."""
    if spec.backend != "auto" and spec.device == "cpu":
        return "decodes on a GPU, and this is the processor"
    return why_not_installed(spec)


class DeviceLoaderRow(LoaderRow):
    """A `LoaderRow` whose batches are on the device: those of torch's loader are copied there.

    Args:
        spec: which loader.
        photos: what is loaded.
        batch_size: images in a batch.
        side: height and width of the images that it makes.
    """

    def __init__(self, spec: LoaderSpec, photos: Photos, batch_size: int, side: int) -> None:
        transform = train_transform(spec.output, side)
        super().__init__(spec, photos.folder, photos.indices, batch_size, transform)

    def batches(self, images: int) -> Iterator[Any]:
        """An epoch of so many images, on the device."""
        for batch in super().batches(images):
            yield [tensor.to(self.spec.device, non_blocking=True) for tensor in batch]
