"""The case ``augment`` with other libraries, single operations, loaders, and what was asked for."""

from __future__ import annotations

import tempfile
from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.cases.augment_recipes import (
    PAIRS,
    RECIPES,
    ArrayBatches,
    ArrayRecipe,
    ScriptedRecipe,
    with_arrays,
)
from benchmarks.lines import Studied
from benchmarks.peers.children import albumentations, batchgenerators, kornia, monai_augment, torchaudio
from benchmarks.peers.rows import ChildRow, Peer, interpreter
from benchmarks.targets import Asked, judged, judged_rates
from fastpipe.bench import augment
from fastpipe.bench.augment import (
    BOTH,
    CLASSES,
    POLICIES,
    Batches,
    ChainCheck,
    Kit,
    Place,
    Recipe,
    check_chains,
    floats,
    interpolation,
    mixed_up,
    ways_of,
)
from fastpipe.bench.data import Photos
from fastpipe.bench.images import MEAN, SIDE, STD, LoaderRow, LoaderSpec, train_transform
from fastpipe.bench.results import RowInfo
from fastpipe.bench.runner import Contender, ContenderError, Sample, Session, calibrate, ratios, summarise
from fastpipe.core.extras import require

# Seconds for which a single operation is measured: there are many of them.
SINGLE_S = 0.15
# The CUDA runtime's names of calls that block the host.
_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
_FLOAT = ("float32",)


# ---- Single operations ------------------------------------------------------------------------------


_KINDS: dict[str, tuple[type[Recipe], str]] = {
    "spectrograms": (ScriptedRecipe, "slices in torch"), "volumes": (ScriptedRecipe, "NumPy and SciPy"),
    "sequences": (ArrayRecipe, "NumPy"),
}  # fmt: skip


def cut_mixed(kit: Kit) -> list[Any]:
    return [kit.CutMix(num_classes=CLASSES)]


def _single(
    name: str, make: Callable[[Kit], Any], dtypes: Sequence[str] = BOTH, unit: str = "images"
) -> Recipe:
    kind, whose = _KINDS.get(unit, (Recipe, "torchvision v2"))
    return kind(f"op-{name}", name, lambda kit, dtype: [make(kit)], dtypes=dtypes, unit=unit, whose=whose)


def _of_policy(name: str) -> Recipe:
    """With torchvision's defaults."""
    return Recipe(f"op-{name}", name, lambda kit, dtype: [getattr(kit, name)()], has_policy=True)


def _of_volumes(name: str, make: Callable[[Kit], Any]) -> Recipe:
    return _single(name, make, _FLOAT, "volumes")


def _of_motion(name: str, make: Callable[[Kit], Any]) -> Recipe:
    return _single(name, make, _FLOAT, "sequences")


SINGLE = (
    _single("RandomResizedCrop", lambda kit: kit.RandomResizedCrop(SIDE)),
    _single("RandomHorizontalFlip", lambda kit: kit.RandomHorizontalFlip()),
    _single("RandomVerticalFlip", lambda kit: kit.RandomVerticalFlip()),
    _single(
        "RandomAffine",
        lambda kit: kit.RandomAffine(30, (0.1, 0.1), (0.8, 1.2), 10, interpolation=interpolation("bilinear")),
    ),
    _single("RandomRotation", lambda kit: kit.RandomRotation(30, interpolation=interpolation("bilinear"))),
    _single("ColorJitter", lambda kit: kit.ColorJitter(0.8, 0.8, 0.8, 0.2)),
    _single("RandomGrayscale", lambda kit: kit.RandomGrayscale(0.2)),
    _single("GaussianBlur", lambda kit: kit.GaussianBlur(23)),
    _single("RandomErasing", lambda kit: kit.RandomErasing(0.25)),
    *map(_of_policy, POLICIES),
    _single("ToDtype", floats, ("uint8",)),
    _single("Normalize", lambda kit: kit.Normalize(MEAN, STD), _FLOAT),
    Recipe("op-MixUp", "MixUp", lambda kit, dtype: [], mixed_up, _FLOAT),
    Recipe("op-CutMix", "CutMix", lambda kit, dtype: [], cut_mixed, _FLOAT),
    _single("SpecAugment", lambda kit: kit.SpecAugment(2, 30, 2, 20), _FLOAT, "spectrograms"),
    _single("RandomGain", lambda kit: kit.RandomGain(6.0), _FLOAT, "spectrograms"),
    _single("TimeShift", lambda kit: kit.TimeShift(40), _FLOAT, "spectrograms"),
    _of_volumes("RandomAffine3D", lambda kit: kit.RandomAffine3D(30, (0.7, 1.4))),
    _of_volumes("RandomElastic3D", lambda kit: kit.RandomElastic3D((3, 4, 4), 3.0)),
    _of_volumes("RandomFlip3D", lambda kit: kit.RandomFlip3D()),
    _of_volumes("RandomRotate90", lambda kit: kit.RandomRotate90()),
    _of_volumes("GaussianNoise3D", lambda kit: kit.GaussianNoise3D((0.0, 0.1))),
    _of_volumes("GaussianBlur3D", lambda kit: kit.GaussianBlur3D((0.5, 1.0))),
    _of_volumes("Brightness3D", lambda kit: kit.Brightness3D((0.75, 1.25))),
    _of_volumes("Contrast3D", lambda kit: kit.Contrast3D((0.75, 1.25))),
    _of_volumes("LowResolution3D", lambda kit: kit.LowResolution3D((0.5, 1.0))),
    _of_volumes("Gamma3D", lambda kit: kit.Gamma3D((0.7, 1.5))),
    _of_motion("MotionSpeed", lambda kit: kit.MotionSpeed((0.8, 1.25))),
    _of_motion("MotionTranslation", lambda kit: kit.MotionTranslation(0.1)),
    _of_motion("MotionScale", lambda kit: kit.MotionScale((0.9, 1.1))),
    _of_motion("MotionMirror", lambda kit: kit.MotionMirror(PAIRS)),
)


# ---- Loaders: recipes from files to a model's input, whole and split ---------------------------------


@dataclass(frozen=True)
class Loaded:
    """A transform of a dataset, from PIL images to tensors.

    Attributes:
        key: the name of its section in the JSON file.
        label: its name in tables.
        transform: makes it.
    """

    key: str
    label: str
    transform: Callable[[], Any]


def _of_recipe(number: int) -> Any:
    """A recipe as a script's transform: what can be done to PIL images is, and tensors are made after it."""
    v2 = require("torchvision.transforms.v2", extra="torch")
    ops = RECIPES[number].ops(v2, "uint8")
    at = next(at for at, op in enumerate(ops) if isinstance(op, v2.ToDtype))
    return v2.Compose([*ops[:at], v2.ToImage(), *ops[at:]])


def _cropped(number: int) -> Any:
    """A recipe that follows the crop, with the crop."""
    v2 = require("torchvision.transforms.v2", extra="torch")
    return v2.Compose([v2.RandomResizedCrop(SIDE), *_of_recipe(number).transforms])


def _grey() -> Any:
    """The least that can be split off."""
    kit: Kit = require("torchvision.transforms", extra="torch")
    crop, flip, *end = train_transform("float32").transforms
    return kit.Compose([crop, flip, kit.RandomGrayscale(0.2), *end])


# Another transform to be loaded with is another line here.
LOADED = (
    Loaded("files-simclr", "from files: SimCLR", lambda: _of_recipe(0)),
    Loaded("files-deit", "from files: DeiT, no MixUp", lambda: _of_recipe(1)),
    Loaded("files-randaugment", "from files: crop, flip, RandAugment, normalise", lambda: _cropped(5)),
    Loaded(
        "files-trivialaugmentwide",
        "from files: crop, flip, TrivialAugmentWide, normalise",
        lambda: _cropped(6),
    ),
    Loaded("files-grey", "from files: crop, flip, RandomGrayscale(.2), normalise", _grey),
    Loaded("files-crop", "from files: crop, flip, normalise", lambda: train_transform("float32")),
)


def loader_rows(
    loaded: Loaded, photos: Photos, batch_size: int, cores: int
) -> list[tuple[RowInfo, Callable[[], LoaderRow]]]:
    """The rows of a section, and what makes them.

    Args:
        loaded: the transform.
        photos: what is loaded.
        batch_size: images in a batch.
        cores: how many workers the replaced loader has.
    """
    fast = "FastImageFolder + FastLoader"
    specs: Sequence[LoaderSpec] = (
        LoaderSpec(
            f"{loaded.key}-replaced", f"ImageFolder + DataLoader(num_workers={cores})", "replaced", cores
        ),
        LoaderSpec(f"{loaded.key}-whole", fast, "fastpipe"),
        LoaderSpec(f"{loaded.key}-auto", f'{fast}, augment="auto"', "fastpipe", augment="auto"),
    )

    return [
        (spec, partial(LoaderRow, spec, photos.folder, photos.indices, batch_size, loaded.transform()))
        for spec in (replace(one, section=loaded.key, unit="images") for one in specs)
    ]


# ---- Calls on CUDA that wait ------------------------------------------------------------------------


@dataclass
class WaitingCheck(ChainCheck):
    """A check that has also looked for calls that wait.

    Attributes:
        waiting: chains on CUDA whose call keeps the host waiting, where that was looked at.
    """

    waiting: Sequence[str] | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the outcome for the JSON file."""
        return {**super().as_json(), "waiting": self.waiting}


def calls_that_wait(
    places: Iterable[Place], batches: Batches, say: Callable[[str], None] = lambda text: None
) -> list[str]:
    """Chains on a device whose call keeps the host waiting, with what it waits in.

    Args:
        places: those on CUDA are looked at, all of fastpipe's ways.
        batches: the data.
        say: told what is looked at.
    """
    found = []
    for place in places:
        for way in ways_of(place) if place.device != "cpu" else ():
            say(f"profiling: {place.label}: {way.label}")
            chain, given = place.recipe.chain(place.dtype, **way.options), place.given(batches)
            if waits := _waits_of(lambda chain=chain, given=given: chain(*given)):  # type: ignore[misc]
                found.append(f"{place.label}: {way.label}: {', '.join(sorted(set(waits)))}")
    return found


def _waits_of(call: Callable[[], Any]) -> list[str]:
    """Names of the events within a call in which the host waits for the device."""
    torch, profiler = require("torch", extra="torch"), require("torch.profiler", extra="torch")
    for _ in range(2):  # pinned memory and kernels are made in the first call
        call()
    torch.cuda.synchronize()
    activities = [profiler.ProfilerActivity.CPU, profiler.ProfilerActivity.CUDA]
    with profiler.profile(activities=activities) as profile:
        # The profiler itself waits at its end: only what is within the mark counts.
        with profiler.record_function("fastpipe-call"):
            call()
        torch.cuda.synchronize()
    return waits_within(profile.events(), "fastpipe-call")


def waits_within(events: Iterable[Any], mark: str) -> list[str]:
    """Names of those events, begun within the one called ``mark``, that wait for a device.

    Args:
        events: of torch's profiler.
        mark: the name.
    """
    told = list(events)
    spans = [event.time_range for event in told if event.name == mark]
    return [
        event.name
        for event in told
        if event.name in _WAITS and any(span.start <= event.time_range.start <= span.end for span in spans)
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
        """Return whether it has this recipe for this dtype on this device.  Single operations take floats."""
        dtypes = ("float32",) if place.is_single else self.dtypes
        return place.recipe.key in self.has and place.dtype in dtypes and place.device == self.device

    def info(self, place: Place) -> RowInfo:
        """Return the name of its row in the report."""
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


def _volume_peer(key: str, label: str, module: str, is_worker: bool) -> AugmentPeer:
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
    _volume_peer("batchgenerators", "batchgeneratorsv2, volume by volume", "batchgeneratorsv2", False),
    _volume_peer("batchgenerators-worker", "batchgeneratorsv2, volume by volume", "batchgeneratorsv2", True),
    _volume_peer("monai", "MONAI, volume by volume", "monai", False),
    _volume_peer("monai-worker", "MONAI, volume by volume", "monai", True),
    _kornia("kornia", "cuda"),
)  # fmt: skip


def wanted_of(peer: AugmentPeer, places: list[Place]) -> list[Place]:
    """A request to a peer."""
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


class TaskRow(Contender):
    """A `Contender`: one of the recipes that a process of a peer does.

    Args:
        key: its name.
        child: the peer's process; the caller ends it.
        task: the recipe with its dtype.
        batch_size: samples in a batch of it.
    """

    def __init__(self, key: str, child: AugmentChild, task: str, batch_size: int) -> None:
        self.key, self.chunk = key, batch_size
        self._child, self._task = child, task

    def measure(self, count: int) -> float:
        """Augment so many samples; return the seconds it took."""
        return self._child.measure_task(self._task, count // self.chunk)


# ---- Figures of single operations: too many for bars, so they are printed as lines ------------------


def single_of(
    places: Iterable[Place],
    infos: Mapping[str, RowInfo],
    samples: Mapping[str, Sequence[Sample]],
    count: Callable[[str], int],
) -> dict[str, Any]:
    """Return the results of single operations.

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
    """Return all targets with the measured figures.

    Args:
        samples: of a finished run, by row.
        waiting: calls that keep the host waiting, from `calls_that_wait`; None without CUDA.
        recipes: those that were run; all, where there are none.
    """
    counts = [] if waiting is None else [len(waiting)]
    text = "chains on CUDA whose call keeps the host waiting"
    asked = [one for one in ASKED if not recipes or one.row.startswith(tuple(f"{key}-" for key in recipes))]
    return [*judged_rates(samples, asked), judged(text, 0, "chains", counts, is_most=True)]


# ---- The case ---------------------------------------------------------------------------------------


class Bench(Studied, augment.Bench):
    """One run of the case, with everything."""

    recipes: ClassVar[Sequence[Recipe]] = RECIPES
    batches: ArrayBatches

    @classmethod
    def add_arguments(cls, parser: ArgumentParser) -> None:
        """Add the options of the case."""
        super().add_arguments(parser)
        parser.add_argument("--no-single", action="store_true",
                            help="leave single operations out, which are most of the rows")  # fmt: skip

    def prepare(self) -> None:
        """Make volumes and motion too, and choose what is measured."""
        super().prepare()
        self.batches = with_arrays(self.batches)
        units = {place.recipe.unit for place in self.places}
        single = [] if self.args.no_single else [one for one in SINGLE if one.unit in units]
        self.single, self.loaded = self.places_of(single), () if self.args.recipe else LOADED
        self.waiting: list[str] | None = None

    def compared(self, rows: Sequence[Any]) -> ChainCheck:
        """Compare all chains with torchvision's functions, and look for calls that wait."""
        every = [*self.places, *self.single]
        check = check_chains(every, self.batches, self.progress.now)
        if check.ok and "cuda" in self.devices:
            self.waiting = calls_that_wait(every, self.batches, self.progress.now)
            for text in self.waiting:
                self.warnings.append(f"a call waits for the device: {text}")
            self.progress.done(f"check: {len(self.waiting)} chains on CUDA keep the host waiting")
        return WaitingCheck(**vars(check), waiting=self.waiting)

    def described(self, session: Session) -> dict[str, Any]:
        """Return what was augmented, with the sections that are loaded from files."""
        fields = super().described(session)
        fields["sections"] |= {loaded.key: {"label": loaded.label} for loaded in self.loaded}
        return fields

    def warmed(self, contender: Contender) -> int:
        """Warm a row up: single operations are measured for less."""
        seconds = self.plan().seconds
        return calibrate(contender, min(seconds, SINGLE_S) if contender.key.startswith("op-") else seconds)

    def others(self) -> list[Contender]:
        """Build the rows of single operations, of peers, and from files."""
        found = self.rows_of(self.single)
        every = [*self.places, *self.single]
        for peer, child in self._children(every):
            for place in wanted_of(peer, every):
                info = child.told(peer.info(place))
                count = self.batches.count(place.recipe.unit)
                found.append(self.added(info, TaskRow(info.key, child, place.task, count)))
        for loaded in self.loaded:
            found += self.opened(loader_rows(loaded, self.photos, len(self.batches), self.cores))
        return found

    def studies(self, session: Session) -> dict[str, Any]:
        """Return the figures of single operations, and judge those that were asked for."""
        return {
            "method": {**self.method(session.rounds), "single_s": SINGLE_S},
            "single": single_of(self.single, self.infos, session.samples, self.batches.count),
            "targets": targets(session.samples, self.waiting, self.args.recipe or ()),
        }

    def _children(self, places: list[Place]) -> list[tuple[AugmentPeer, AugmentChild]]:
        """Start the peers; one that is not there is noted, and what one lacks."""
        if not self.args.peers:
            return []
        folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory(prefix="fastpipe-bench-")))
        files, found = self.batches.save(folder), []
        for peer in AUGMENT_PEERS:
            if (child := self._child(peer, files, wanted_of(peer, places))) is not None:
                self.stack.callback(child.close)
                found.append((peer, child))
                for recipe, why in (peer.lacks or {}).items():
                    self.miss(f"{recipe}-{peer.peer.key}", f"{recipe}: {peer.peer.label}", why)
        return found

    def _child(self, peer: AugmentPeer, files: Mapping[str, str], places: list[Place]) -> AugmentChild | None:
        """Start the process of a peer, if it is there and asked for anything."""
        one, python = peer.peer, interpreter(peer.peer)
        if not places:
            return None
        if python is None:
            self.miss(one.key, one.label, f"not installed: {one.install}")
            return None
        self.progress.now(f"starting {one.label}")
        try:
            return AugmentChild(peer, python, files, places, len(self.batches), self.cores)
        except ContenderError as error:
            self.miss(one.key, one.label, str(error))
            return None
