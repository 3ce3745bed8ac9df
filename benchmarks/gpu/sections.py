"""The sections of the case: their rows, and what makes them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

import fastpipe
from benchmarks.cases.augment_recipes import RECIPES, VOLUMES, ArrayBatches, made_volumes, with_arrays
from benchmarks.gpu.training import (
    CLASSES as IMAGE_CLASSES,
)
from benchmarks.gpu.training import (
    SameBatch,
    Sizes,
    Trainer,
    TrainRow,
    fitting_batch,
    image_model,
)
from benchmarks.peers.rows import Peer, PeerRow, interpreter
from fastpipe import Decode, augment
from fastpipe.bench.augment import AugmentRow, Place, made_batches
from fastpipe.bench.data import Photos
from fastpipe.bench.images import LoaderRow, LoaderSpec, train_transform, why_not_installed
from fastpipe.bench.results import RowInfo
from fastpipe.bench.runner import Contender, Draws
from fastpipe.bench.volume import Scroll, made_scroll, patch_dataset
from fastpipe.core.extras import require

# ----------------------------------------------------------------------------------------------------
# The rows that decode photos to batches on the device, and the loaders that the training rows have.

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
                decode=Decode(backend), device=device,
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
        decode=Decode("nvimgcodec", gpu_share="auto"), device=device,
    )  # fmt: skip


def why_missing(spec: LoaderSpec) -> str:
    """Why a back end of a GPU is not measured; empty where it is. Nothing is imported."""
    if spec.decode.backend != "auto" and spec.device == "cpu":
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


# ---- The rows that decode with other libraries, each in a process of its own ------------------------


def decoding_peers(device: str) -> tuple[Peer, ...]:
    """The rows that decode, crop, resize and mirror photos on the device.

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
    """Return a peer's name in the report, before it is started."""
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

    @property
    def info(self) -> RowInfo:
        """The row, with what the child told."""
        return replace(super().info, section=self._section, unit="images")


# ---- The rows that augment one batch again and again, on the processor and on the device ------------

# Section → the recipe's key, as of the case ``augment``.
AUGMENTED = {"augment-images": "simclr", "augment-volumes": "volume"}
_DTYPE = "float32"


def batches_of(folder: Path, name: str, sizes: Sizes) -> ArrayBatches:
    """The data to augment: photos of a folder, and synthetic volumes.

    Args:
        folder: an image folder.
        name: what the report calls it.
        sizes: how much.
    """
    made = with_arrays(made_batches(folder, name, sizes.augmented))
    volumes, labels = made_volumes(np.random.default_rng(0), len(made.volumes), sizes.volume)
    return replace(made, volumes=volumes, labels_of_volumes=labels)


def augment_rows(
    section: str, batches: ArrayBatches, device: str
) -> list[tuple[RowInfo, Callable[[], AugmentRow]]]:
    """The rows of a section, and what makes them: fastpipe's chain on the processor, then on a GPU.

    Args:
        section: of `AUGMENTED`.
        batches: what is augmented.
        device: ``"cuda"``, or ``"cpu"``, where there is only the first of them.
    """
    recipe = next(one for one in RECIPES if one.key == AUGMENTED[section])

    def row(kind: str, label: str, group: str, where: str) -> tuple[RowInfo, Callable[[], AugmentRow]]:
        info = RowInfo(f"{section}-{kind}", label, group, None, _DTYPE, "", section=section, unit=recipe.unit)
        return info, lambda: _row(info.key, Place(recipe, _DTYPE, where), batches)

    rows = [row("replaced", "augment.Compose, on the processor", "replaced", "cpu")]
    if device == "cuda":
        rows.append(row("device", "augment.Compose, on the GPU", "fastpipe", "cuda"))
    return rows


def _row(key: str, place: Place, batches: ArrayBatches) -> AugmentRow:
    given: tuple[Any, ...] = place.given(batches)
    chain = place.recipe.chain(place.dtype)
    return AugmentRow(key, lambda: _first(chain(*given)), len(given[0]), place.device)


def _first(found: Any) -> Any:
    """The augmented batch, without the labels beside it."""
    return found[0] if isinstance(found, (list, tuple)) else found


# ---- Training on patches of a volume: augmented on the processor, or where the step is --------------

CLASSES = 2  # within a sheet of the scroll, or not
_MEAN, _STD = 20_000, 10_000  # of its values, about
# Of a patch, points are moved; by how many voxels (standard deviation).  As of examples/volume_patches.
_POINTS, _BEND = (3, 4, 4), 3.0


@dataclass(frozen=True)
class Patched:
    """An augmentation of patches: a section.

    Attributes:
        label: its name in tables.
        chain: makes it.
    """

    label: str
    chain: Callable[[], Callable[..., Any]]


class _Normalised:
    """A chain of volumes of a mean of about 0 and a standard deviation of about 1, which nnU-Net's wants.

    Args:
        chain: of values and labels.
    """

    def __init__(self, chain: Callable[..., Any]) -> None:
        self._chain = chain

    def __call__(self, patches: Any, labels: Any) -> Any:
        return self._chain(patches.float().sub_(_MEAN).div_(_STD), labels)


PATCHED = {
    "patches-elastic": Patched(
        "RandomElastic3D", lambda: _Normalised(augment.RandomElastic3D(_POINTS, _BEND, fill="edge"))
    ),
    "patches-nnunet": Patched("nnU-Net's default", lambda: _Normalised(augment.nnunet_default())),
}


class PatchFeed:
    """A `Feed` of patches, all of whose chunks are remembered: what is left is cutting and augmentation.

    Args:
        scroll: the volume.
        batch_size: patches in a batch.
        chain: augments a batch.
        device: where it is augmented; None for the processor.
    """

    workers = 0

    def __init__(self, scroll: Scroll, batch_size: int, chain: Any, device: str | None) -> None:
        self._draws = Draws(range(scroll.epoch), batch_size)
        dataset = patch_dataset(scroll, 2 * scroll.nbytes)
        self._loader: Any = fastpipe.FastLoader(
            dataset, batch_size, sampler=self._draws, augment=chain, device=device
        )

    def batches(self, count: int) -> Iterator[Any]:
        """So many patches."""
        self._draws.length = count
        yield from self._loader

    def close(self) -> None:
        """Let go of the loader, which ends its threads."""
        self._loader = None
        gc.collect()


def patch_model(device: str) -> Trainer:
    """A step of a small 3D convolutional net that works at a quarter of the resolution."""
    nn = require("torch", extra="torch").nn

    def block(inputs: int, outputs: int, stride: int) -> list[Any]:
        convolution = nn.Conv3d(inputs, outputs, 3, stride=stride, padding=1)
        return [convolution, nn.InstanceNorm3d(outputs, affine=True), nn.LeakyReLU()]

    layers = [*block(1, 16, 2), *block(16, 32, 2), *block(32, 32, 1), nn.Conv3d(32, CLASSES, 1)]
    model = nn.Sequential(*layers, nn.Upsample(scale_factor=4, mode="trilinear"))
    return Trainer(model, device, lambda patches: patches.unsqueeze(1))


# ---- The sections of the case: their rows, and what makes them --------------------------------------

_CEILING = "a batch that is always there"


@dataclass(frozen=True)
class Candidate:
    """A row that may be measured.

    Attributes:
        info: what the report calls it.
        make: builds it; None where it is not to be.
        why: then why not.
    """

    info: RowInfo
    make: Callable[[], Contender] | None
    why: str = ""


@dataclass
class Run:
    """A section's measurement, and its data.

    Attributes:
        device: ``"cuda"`` or ``"cpu"``.
        sizes: how much.
        photos: what is decoded.
        cores: processors that may be used.
        batch: images in a batch; in training, as many of them as have room.
        problems: of a decoder that is not to be measured, by its back end, why not.
        say: told what takes long.
    """

    device: str
    sizes: Sizes
    photos: Photos
    cores: int
    batch: int
    problems: Mapping[str, str] = field(default_factory=dict)
    say: Callable[[str], None] = lambda text: None

    @property
    def place(self) -> str:
        """The device in words."""
        return "the GPU" if self.device == "cuda" else "the processor"

    @cached_property
    def augmented(self) -> ArrayBatches:
        """Return the data to augment."""
        return batches_of(self.photos.folder, self.photos.name, self.sizes)

    @cached_property
    def scroll(self) -> Scroll:
        """The volume that patches are of."""
        made = made_scroll(self.sizes.scroll, None, self.say)
        made.warm()
        return made


@dataclass(frozen=True)
class Section:
    """Rows that are compared with each other.

    Attributes:
        key: its name in the JSON file.
        label: its name in tables, once its rows are known.
        weight: its part of the time, over that of all.
        candidates: its rows, what is replaced first.
    """

    key: str
    label: Callable[[Run], str]
    weight: float
    candidates: Callable[[Run], list[Candidate]]

    @property
    def ceiling(self) -> str:
        """The row whose batch is always there, if it has one."""
        return f"{self.key}-ceiling"


def _loaders(run: Run, section: str, output: Any, make: Callable[[LoaderSpec], Contender]) -> list[Candidate]:
    """The loaders of a section; back ends that are not there, or decode other pixels, with the reason."""
    found = []
    for spec in loader_specs(section, run.device, run.cores, output):
        why = why_missing(spec) or run.problems.get(spec.decode.backend, "")
        info = replace(spec, section=section, unit="images")
        found.append(Candidate(info, None if why else lambda spec=spec: make(spec), why))  # type: ignore[misc]
    return found


def _decoding(run: Run) -> list[Candidate]:
    """Photos to batches of bytes on the device: loaders, and other libraries."""

    def loader(spec: LoaderSpec) -> Contender:
        return DeviceLoaderRow(spec, run.photos, run.batch, run.sizes.side)

    found = _loaders(run, "decode", "uint8", loader)
    for peer in decoding_peers(run.device):
        python, info = interpreter(peer), row_info(peer, "decode")
        if python is None:
            found.append(Candidate(info, None, f"not installed; {peer.install}"))
            continue
        found.append(
            Candidate(
                info,
                lambda peer=peer, python=python: DecodingPeerRow(  # type: ignore[misc]
                    peer, python, run.photos, run.batch, run.cores, run.sizes.side, "decode"
                ),
            )
        )
    return found


def _training(run: Run) -> list[Candidate]:
    """Steps of a model for images, on what loaders give, and on a batch that is always there."""
    torch = require("torch", extra="torch")
    step, side, device = image_model(run.sizes, run.device), run.sizes.side, run.device

    def batch_of(size: int) -> list[Any]:
        return [
            torch.randn(size, 3, side, side, device=device),
            torch.randint(IMAGE_CLASSES, (size,), device=device),
        ]

    run.batch = fitting_batch(step, batch_of, run.batch)

    def trained(spec: LoaderSpec) -> TrainRow:
        return TrainRow(spec.key, DeviceLoaderRow(spec, run.photos, run.batch, side), step, run.batch, device)

    def ceiling() -> TrainRow:
        (spec,) = (
            one for one in loader_specs("train", device, run.cores, "float32") if one.key == "train-cpu"
        )
        feed = SameBatch(_first_of(trained(spec)))
        return TrainRow("train-ceiling", feed, step, run.batch, device)

    info = RowInfo(
        "train-ceiling", _CEILING, "floor", None, "float32", "the ceiling", section="train", unit="images"
    )
    return [*_loaders(run, "train", "float32", trained), Candidate(info, ceiling)]


def _augmenting(section: str) -> Callable[[Run], list[Candidate]]:
    def candidates(run: Run) -> list[Candidate]:
        rows = augment_rows(section, run.augmented, run.device)
        return [Candidate(info, make) for info, make in rows]

    return candidates


def _patching(section: str) -> Callable[[Run], list[Candidate]]:
    def candidates(run: Run) -> list[Candidate]:
        step, size, device = patch_model(run.device), run.sizes.patches, run.device
        fast = "FastPatchDataset + FastLoader, augmented on"

        def row(kind: str, where: str | None) -> TrainRow:
            feed = PatchFeed(run.scroll, size, PATCHED[section].chain(), where)
            return TrainRow(f"{section}-{kind}", feed, step, size, device)

        def candidate(kind: str, label: str, group: str, make: Callable[[], TrainRow]) -> Candidate:
            info = RowInfo(
                f"{section}-{kind}", label, group, None, "float32", "", section=section, unit="patches"
            )
            return Candidate(info, make)

        def ceiling() -> TrainRow:
            feed = SameBatch(_first_of(row("replaced", None)))
            return TrainRow(f"{section}-ceiling", feed, step, size, device)

        found = [candidate("replaced", f"{fast} the processor", "replaced", lambda: row("replaced", None))]
        if device == "cuda":
            label = f"{fast} the GPU"
            found.append(candidate("device", label, "fastpipe", lambda: row("device", device)))
        return [*found, candidate("ceiling", _CEILING, "floor", ceiling)]

    return candidates


def _first_of(row: TrainRow) -> list[Any]:
    """A batch of a row that is there for nothing else."""
    try:
        return row.first()
    finally:
        row.close()


def _images(run: Run) -> str:
    return f"{run.sizes.side}×{run.sizes.side}, batches of {run.batch}"


def _patches(run: Run) -> str:
    return _volumes(run.sizes.scroll.patch, run.sizes.patches)


def _volumes(size: tuple[int, ...], count: int) -> str:
    return f"{'×'.join(map(str, size))}, batches of {count}"


SECTIONS = (
    Section("decode", lambda run: f"decoded to {_images(run)}, uint8 on {run.place}", 3, _decoding),
    Section("train", lambda run: f"training steps of {run.sizes.model}, {_images(run)}", 4, _training),
    Section(
        "augment-images",
        lambda run: f"SimCLR's augmentation, batches of {run.sizes.augmented}",
        1,
        _augmenting("augment-images"),
    ),
    Section(
        "augment-volumes",
        lambda run: f"nnU-Net's default, {_volumes(run.sizes.volume, VOLUMES)}",
        1,
        _augmenting("augment-volumes"),
    ),
    *(
        Section(
            key,
            lambda run, label=patched.label: (  # type: ignore[misc]
                f"training steps on patches, {label}, {_patches(run)}"
            ),
            1.5,
            _patching(key),
        )
        for key, patched in PATCHED.items()
    ),
)
