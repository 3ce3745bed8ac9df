"""Before anything is timed: are the images those of torchvision's functions?  And does a call wait?"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from fastpipe.bench.augment.data import Batches
from fastpipe.bench.augment.recipes import chain_of
from fastpipe.bench.augment.rows import Place, ways_of
from fastpipe.bench.loaders import STD
from fastpipe.core.extras import require

__all__ = ["ChainCheck", "calls_that_wait", "check_chains"]

# What rounding in another order may come to, of numbers of 0 to 1 and of what is normalised.
NEAR = 2e-4
# A policy equalises floats by their histogram as bytes: a value that falls on the other side of a step may
# move all others by a level, here of what is normalised.
LEVEL = 1.01 / 255 / min(STD)
# Bicubic crops of floats go beyond 0 and 1, where torchvision's conversion to bytes wraps around.
MOST_WRAPPED = 0.05
# A value beside a step (of bytes, of a policy's thresholds) may fall on the step's other side.  The processor
# rounds as torchvision does; on a device colours are computed in another order, and a policy may go on to
# invert one of two.
MOST_FAR = {"cpu": 0.01, "cuda": 0.1}
# Of a batch of a single operation, of which there are many: torchvision's functions take image by image.
SINGLE_SAMPLES = 16

# What the CUDA runtime calls what keeps the host waiting.
_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")


@dataclass
class ChainCheck:
    """How batches compare with torchvision's functions, given the same parameters.

    Attributes:
        batches: how many were compared.
        alike: of these, those of which only the average was.
        values: how many numbers.
        far: how many of them differ by more than rounding, or than a level where bytes are counted.
        largest: the largest difference of the others.
        problems: what is wrong; empty when all is well.
    """

    batches: int = 0
    alike: int = 0
    values: int = 0
    far: int = 0
    largest: float = 0.0
    problems: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def add(self, what: str, found: Any, wanted: Any, near: float, most_far: float) -> None:
        """Compare a batch.

        Args:
            what: whose.
            found: tensor to check.
            wanted: what it should be.
            near: how far apart two values may be.
            most_far: the part of its values that may be far from it.
        """
        if not self._is_of_form(what, found, wanted):
            return
        apart = (found.float() - wanted.float()).abs()
        # What is no number is far from everything.
        is_far = ~(apart <= near)
        far = int(is_far.sum())
        self.values, self.far = self.values + apart.numel(), self.far + far
        if far < apart.numel():
            self.largest = max(self.largest, float(apart[~is_far].max()))
        if far > most_far * apart.numel():
            self.problems += (f"{what}: {far / apart.numel():.2%} of the values differ",)

    def add_like(self, what: str, found: Any, wanted: Any, most_apart: float) -> None:
        """Compare a batch that is only like what it should be.

        Args:
            what, found, wanted: as of `add`.
            most_apart: how far values may be apart on average.
        """
        if not self._is_of_form(what, found, wanted):
            return
        self.alike += 1
        apart = float((found.float() - wanted.float()).abs().mean())
        if not apart <= most_apart:
            self.problems += (
                f"{what}: values are {apart:.2g} apart on average, at most {most_apart:g} asked",
            )

    def _is_of_form(self, what: str, found: Any, wanted: Any) -> bool:
        """Whether dtype and shape are the same; what is not is noted."""
        self.batches += 1
        is_same: bool = found.dtype == wanted.dtype and found.shape == wanted.shape
        if not is_same:
            seen, right = (f"{one.dtype} {tuple(one.shape)}" for one in (found, wanted))
            self.problems += (f"{what}: a batch is {seen}, expected {right}",)
        return is_same

    def sentence(self) -> str:
        """The outcome in words."""
        if not self.ok:
            return f"outputs differ from torchvision's functions: {'; '.join(self.problems)}"
        exact, equal = self.batches - self.alike, 1 - self.far / max(1, self.values)
        return (
            f"{exact} batches agree with torchvision's functions, or NumPy's and SciPy's, given the same"
            f" parameters: {equal:.4%} of {self.values:,} values differ by at most {self.largest:.1g}, the"
            " others are beside a step"
            + (f"; {self.alike} that are fused are like them" if self.alike else "")
        )

    def as_json(self) -> dict[str, Any]:
        """The outcome for the JSON file."""
        told = {name: getattr(self, name) for name in ("batches", "alike", "values", "far", "largest")}
        return {**told, "problems": list(self.problems), "ok": self.ok, "text": self.sentence()}


def check_chains(
    places: Iterable[Place], batches: Batches, say: Callable[[str], None] = lambda text: None
) -> ChainCheck:
    """Compare each chain with its ``reference``, in each way that it is applied.

    Args:
        places: the recipes, with what they are applied to.
        batches: the data.
        say: told what is compared.
    """
    torch = require("torch", extra="torch")
    check = ChainCheck()
    for place in places:
        images = place.given(batches)[0]
        images = images[:SINGLE_SAMPLES] if place.is_single else images
        for way in ways_of(place):
            say(f"comparing: {place.label}: {way.label}")
            chain = chain_of(place.recipe, place.dtype, **way.options)
            parameters = chain.draw(images.shape, generator=torch.Generator().manual_seed(0))
            found, wanted = chain.apply(images, parameters), chain.reference(images, parameters)
            if way.apart is not None:
                check.add_like(f"{place.label}: {way.label}", found, wanted, way.apart)
                continue
            counts_bytes = place.recipe.has_policy and place.dtype == "float32"
            near, most_far = NEAR, MOST_FAR[place.device]
            if counts_bytes:
                near, most_far = LEVEL, max(MOST_WRAPPED, most_far)
            check.add(f"{place.label}: {way.label}", found, wanted, near, most_far)
    return check


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
            chain, given = chain_of(place.recipe, place.dtype, **way.options), place.given(batches)
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
