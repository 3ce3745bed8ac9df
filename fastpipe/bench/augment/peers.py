"""The rows of the case that are other libraries, each in a process of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from fastpipe.bench.augment.data import CLASSES
from fastpipe.bench.augment.rows import Place
from fastpipe.bench.loaders import MEAN, SIDE, STD
from fastpipe.bench.peer_children import albumentations, batchgenerators, kornia, monai_augment, torchaudio
from fastpipe.bench.peers import ChildRow, Peer
from fastpipe.bench.results import RowInfo

__all__ = ["AUGMENT_PEERS", "AugmentChild", "AugmentPeer", "TaskRow", "wanted_of"]


@dataclass(frozen=True)
class AugmentPeer:
    """A library that augments.

    Attributes:
        peer: what it is; its key is the end of its rows' keys.
        has: the recipes it has, and what differs in them.
        device: where its batches are.
        dtypes: what its recipes are measured with.
        lacks: why a recipe of images is not among them, by the recipe's key.
    """

    peer: Peer
    has: Mapping[str, str]
    device: str = "cpu"
    dtypes: tuple[str, ...] = ("float32", "uint8")
    lacks: Mapping[str, str] | None = None

    def does(self, place: Place) -> bool:
        """Whether it has this recipe, for this dtype, there.  Single operations are of floats."""
        dtypes = ("float32",) if place.is_single else self.dtypes
        return place.recipe.key in self.has and place.dtype in dtypes and place.device == self.device

    def info(self, place: Place) -> RowInfo:
        """What the report calls its row."""
        converted = "made float32 first" if place.dtype == "uint8" and self.peer.source == "kornia" else ""
        notes = (self.peer.note, converted, self.has[place.recipe.key])
        return place.info(self.peer.key, self.peer.label, "peer", "; ".join(note for note in notes if note))


def _kornia(key: str, device: str) -> AugmentPeer:
    note = "the batch at once, same_on_batch=False"
    peer = Peer(
        key, "kornia.augmentation", "kornia", "pip install kornia", "kornia", note=note,
        is_on_gpu=device != "cpu",
    )  # fmt: skip
    return AugmentPeer(peer, kornia.HAS, device)


def _torchaudio(key: str, words: str, is_whole: bool) -> AugmentPeer:
    peer = Peer(
        key, f"torchaudio SpecAugment, {words}", "torchaudio", "pip install torchaudio", "torchaudio",
        options={"whole": is_whole},
    )  # fmt: skip
    return AugmentPeer(peer, torchaudio.HAS)


def _of_volumes(key: str, label: str, module: str, is_worker: bool) -> AugmentPeer:
    has = {"batchgeneratorsv2": batchgenerators.HAS, "monai": monai_augment.HAS}[module]
    source = "monai-augment" if module == "monai" else "batchgenerators"
    install = "make peers" if module == "batchgeneratorsv2" else "pip install monai"
    note = "as in a worker process" if is_worker else "torch's default of threads"
    label = f"{label}, one thread" if is_worker else label
    peer = Peer(key, label, source, install, module, note=note, options={"one_thread": is_worker})
    return AugmentPeer(peer, has, dtypes=("float32",))


AUGMENT_PEERS = (
    _kornia("kornia", "cpu"),
    AugmentPeer(
        Peer(
            "albumentations", "albumentations, sample by sample", "albumentations",
            "pip install albumentations", "albumentations", note="NumPy and OpenCV, its default of threads",
        ),
        albumentations.HAS, dtypes=("uint8",), lacks={
            "deit": "it has no RandAugment", "randaugment": "it has none",
            "trivialaugmentwide": "it has none",
        },
    ),
    _torchaudio("torchaudio", "sample by sample", False),
    _torchaudio("torchaudio-whole", "the batch, iid_masks=True", True),
    _of_volumes("batchgenerators", "batchgeneratorsv2, volume by volume", "batchgeneratorsv2", False),
    _of_volumes("batchgenerators-worker", "batchgeneratorsv2, volume by volume", "batchgeneratorsv2", True),
    _of_volumes("monai", "MONAI, volume by volume", "monai", False),
    _of_volumes("monai-worker", "MONAI, volume by volume", "monai", True),
    _kornia("kornia", "cuda"),
)  # fmt: skip


def wanted_of(peer: AugmentPeer, places: list[Place]) -> list[Place]:
    """What a peer is asked for."""
    return [place for place in places if peer.does(place)]


class AugmentChild(ChildRow):
    """A peer that augments: one process for all its rows.

    Args:
        peer: which library.
        python: the interpreter that has it.
        files: as of `Batches.save`.
        places: what it will be asked for.
        batch_size: samples in a batch.
        threads: how many threads it may use.

    Raises:
        ContenderError: it does not start, or cannot do the first of them.
    """

    def __init__(
        self,
        peer: AugmentPeer,
        python: str,
        files: Mapping[str, str],
        places: list[Place],
        batch_size: int,
        threads: int,
    ) -> None:
        job = {
            **files,
            "tasks": [place.task for place in places],
            "batch_size": batch_size,
            "side": SIDE,
            "mean": MEAN,
            "std": STD,
            "classes": CLASSES,
            "threads": threads,
            "device": peer.device,
            "options": dict(peer.peer.options),
        }
        super().__init__(peer.peer, python, job, batch_size, threads)

    def measure_task(self, task: str, batches: int) -> float:
        """Let it augment so many batches; return the seconds it counted.

        Raises:
            ContenderError: it cannot do that.
        """
        return float(self._ask({"batches": batches, "task": task})["seconds"])

    def told(self, info: RowInfo) -> RowInfo:
        """A row with the versions that the process told."""
        return replace(info, versions=self.first_batch["versions"])


class TaskRow:
    """A `Contender`: one of the recipes that a process of a peer does.

    Args:
        key: its name.
        child: the process, which whoever started it ends.
        task: the recipe with its dtype.
        batch_size: samples in a batch of it.
    """

    workers = 0

    def __init__(self, key: str, child: AugmentChild, task: str, batch_size: int) -> None:
        self.key, self.chunk = key, batch_size
        self._child, self._task = child, task

    def measure(self, count: int) -> float:
        """Augment so many samples; return the seconds it took."""
        return self._child.measure_task(self._task, count // self.chunk)

    def close(self) -> None:
        """Nothing: other rows have the same process."""
