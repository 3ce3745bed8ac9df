"""The sections of the case: their rows, and what makes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from fastpipe.bench.augment.data import VOLUMES, Batches
from fastpipe.bench.data import Photos
from fastpipe.bench.gpu.augmenting import augment_rows, batches_of
from fastpipe.bench.gpu.decoding import DeviceLoaderRow, info_of, loader_specs, why_missing
from fastpipe.bench.gpu.patches import PATCHED, PatchFeed, patch_model
from fastpipe.bench.gpu.peers import DecodingPeerRow, decoding_peers, row_info
from fastpipe.bench.gpu.sizes import Sizes
from fastpipe.bench.gpu.training import CLASSES, SameBatch, TrainRow, fitting_batch, image_model
from fastpipe.bench.loaders import LoaderSpec
from fastpipe.bench.peers import interpreter
from fastpipe.bench.results import RowInfo
from fastpipe.bench.runner import Contender
from fastpipe.bench.volume.data import Scroll, made_scroll
from fastpipe.core.extras import require

__all__ = ["SECTIONS", "Candidate", "Run", "Section"]

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
    """What is measured on what.

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
    def augmented(self) -> Batches:
        """What is augmented."""
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
        why = why_missing(spec) or run.problems.get(spec.backend, "")
        info = info_of(spec, section)
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
            torch.randint(CLASSES, (size,), device=device),
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
