"""The case ``augment`` with other libraries, single operations, and what was asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.peers.children import albumentations, batchgenerators, kornia, monai_augment, torchaudio
from benchmarks.peers.rows import ChildRow, Peer
from benchmarks.targets import Asked, judged, judged_rates
from fastpipe.bench.augment import CLASSES, LOADED, POLICIES, RECIPES, Place, Recipe
from fastpipe.bench.loaders import MEAN, SIDE, STD
from fastpipe.bench.results import RowInfo
from fastpipe.bench.runner import Sample, ratios, summarise

__all__ = [
    "ASKED",
    "AUGMENT_PEERS",
    "AugmentChild",
    "AugmentPeer",
    "TaskRow",
    "single_of",
    "targets",
    "wanted_of",
]


# ---- The rows of the case that are other libraries, each in a process of its own --------------------


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


# ---- Figures of single operations: too many for bars, so they are told in lines ---------------------


def single_of(
    places: Iterable[Place],
    infos: Mapping[str, RowInfo],
    samples: Mapping[str, Sequence[Sample]],
    count: Callable[[str], int],
) -> dict[str, Any]:
    """What came of single operations.

    Args:
        places: the operations, with what they are applied to.
        infos: all rows, by key.
        samples: of a finished run, by row.
        count: samples in a batch, by their unit.

    Returns:
        ``rows``: of each ``key``, ``label``, ``unit``, ``batch_size``, ``ms``, what fastpipe takes for a
        batch (median, low, high), and ``against``: the others' labels with their ``ratio``, how many times
        as fast fastpipe is in the same round.
    """
    rows = []
    for place in places:
        own = f"{place.key}-batch"
        if not samples.get(own):
            continue
        batch = count(place.recipe.unit)
        others = [info for info in infos.values() if info.section == place.key and info.key != own]
        against = [
            {"label": info.label, "note": info.note, "ratio": _told(ratios(samples, own, [info.key]))}
            for info in others
            if samples.get(info.key)
        ]
        rows.append(
            {
                "key": place.key,
                "label": place.label,
                "unit": place.recipe.unit,
                "batch_size": batch,
                "ms": _told(1000 * batch / sample.rate for sample in samples[own]),
                "against": against,
            }
        )
    return {"rows": rows}


def _told(figures: Iterable[float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in summarise(figures)._asdict().items()}


# ---- What was asked of augmentation, as figures, and whether it is met ------------------------------


def _simclr(dtype: str, times_kornia: float) -> tuple[Asked, ...]:
    section = f"simclr-{dtype}"
    stock = (f"{section}-replaced", f"{section}-worker")
    return (
        Asked(f"SimCLR, {dtype}, × kornia", f"{section}-batch", f"{section}-kornia", times_kornia),
        Asked(f"SimCLR, {dtype}, × torchvision sample by sample", f"{section}-batch", stock, 1.5),
        Asked(f"SimCLR, {dtype}, fused, × unfused", f"{section}-fused", f"{section}-batch", 1.5),
    )


def _policy(recipe: Recipe, dtype: str) -> Asked:
    section = f"{recipe.key}-{dtype}"
    stock = (f"{section}-replaced", f"{section}-worker")
    text = f"{recipe.label}, {dtype}, × torchvision sample by sample"
    return Asked(text, f"{section}-batch", stock, 4)


def _split(key: str, words: str) -> Asked:
    """Never slower than without it, but for noise."""
    return Asked(f'{words}, augment="auto", × without', f"{key}-auto", f"{key}-whole", 0.97)


_VOLUME_PEERS = ("batchgenerators", "batchgenerators-worker", "monai", "monai-worker")
ASKED = (
    *_simclr("float32", 25),
    *_simclr("uint8", 3),
    *(_policy(one, dtype) for one in RECIPES if one.label.startswith(POLICIES) for dtype in one.dtypes),
    Asked(
        "SpecAugment, × torchaudio sample by sample",
        "specaugment-float32-batch",
        "specaugment-float32-torchaudio",
        5,
    ),
    Asked(
        "nnU-Net's default, × the fastest of batchgeneratorsv2 and MONAI volume by volume",
        "volume-float32-batch",
        tuple(f"volume-float32-{kind}" for kind in _VOLUME_PEERS),
        6,
    ),
    Asked(
        "motion, × NumPy sequence by sequence",
        "motion-float32-batch",
        ("motion-float32-replaced", "motion-float32-worker"),
        20,
    ),
    *(_split(one.key, one.label) for one in LOADED),
    Asked(
        "nnU-Net's default, on CUDA, × NumPy and SciPy on the processor",
        "volume-float32-cuda-batch",
        ("volume-float32-replaced", "volume-float32-worker"),
        30,
    ),
    Asked("SimCLR, float32, on CUDA, × kornia", "simclr-float32-cuda-batch", "simclr-float32-cuda-kornia", 5),
)


def targets(
    samples: Mapping[str, Sequence[Sample]], waiting: Sequence[str] | None, recipes: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """What came of all figures.

    Args:
        samples: of a finished run, by row.
        waiting: calls that keep the host waiting, from `check.calls_that_wait`; None without CUDA.
        recipes: those that were run; all, where there are none.
    """
    counts = [] if waiting is None else [len(waiting)]
    text = "chains on CUDA whose call keeps the host waiting"
    asked = [one for one in ASKED if not recipes or one.row.startswith(tuple(f"{key}-" for key in recipes))]
    return [*judged_rates(samples, asked), judged(text, 0, "chains", counts, is_most=True)]
