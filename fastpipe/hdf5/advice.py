"""What the facts about a file suggest, in plain words: each piece with its figure and its remedy."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from fastpipe.core.text import in_bytes
from fastpipe.hdf5.filters import BLOSC, DEFLATE, LZ4, LZF, ZSTD
from fastpipe.hdf5.inspecting import DatasetFacts

__all__ = ["SMALL_NBYTES", "Advice", "advise"]

# Below this a dataset is read in no time, however it is stored.
SMALL_NBYTES = 1 << 20

_OFTEN = 1.5  # decodes of a chunk in an epoch
_HUGE_CHUNK = 8 << 20
_TINY_CHUNK = 16 << 10
_LARGE_ENOUGH = 16 << 10  # of a sample, for a chunk of its own
_SMALL_PART = 64 << 10
_MANY_READS = 8
_WINDOW, _WINDOW_NBYTES = 64, 1 << 30
_FAST = {LZF, BLOSC, LZ4, ZSTD}


@dataclass(frozen=True)
class Advice:
    """One piece of advice.

    Attributes:
        dataset: its path.
        kind: a word for programs.
        text: what is the matter, with its figure.
        remedies: what to do, the first that fits first.
    """

    dataset: str
    kind: str
    text: str
    remedies: tuple[str, ...]


@dataclass(frozen=True)
class _Place:
    """What advice depends on besides the dataset."""

    path: str
    batch_size: int
    free_memory: int | None

    def repack(self, facts: DatasetFacts, options: str) -> str:
        return f"fastpipe repack {shlex.quote(self.path)} OUT --dataset {shlex.quote(facts.path)} {options}"


def advise(
    datasets: Sequence[DatasetFacts], path: str, batch_size: int, free_memory: int | None
) -> list[Advice]:
    """Advice on a file's datasets, in their order.

    Args:
        datasets: the facts.
        path: of the file, for commands.
        batch_size: that the facts are for.
        free_memory: bytes; None where nobody knows.
    """
    place = _Place(path, batch_size, free_memory)
    return [advice for facts in datasets for rule in _RULES for advice in rule(facts, place)]


def _is_small(facts: DatasetFacts) -> bool:
    # Of elements without a fixed size nobody says how much they take; what is stored says enough.
    return max(facts.decoded or 0, facts.stored) < SMALL_NBYTES


def _no_samples(facts: DatasetFacts, place: _Place) -> Iterator[Advice]:
    if facts.shape and facts.samples == 0:
        text = f"it has no samples, its shape is {facts.shape}: a loader finds nothing in it"
        yield Advice(facts.path, "empty", text, ("write the data, or leave the dataset out",))


def _missing_plugin(facts: DatasetFacts, place: _Place) -> Iterator[Advice]:
    # Of any size: what cannot be read is not a matter of speed.
    if facts.missing:
        text = f"its filter {', '.join(facts.missing)} is not in the HDF5 library here: it cannot be read"
        yield Advice(facts.path, "missing plugin", text, facts.remedies)


def _decoded_often(facts: DatasetFacts, place: _Place) -> Iterator[Advice]:
    epoch, per_chunk, nbytes = facts.epoch, facts.samples_per_chunk, facts.sample_nbytes
    if _is_small(facts) or epoch is None or per_chunk is None or not nbytes or epoch.decodes < _OFTEN:
        return
    chunk = facts.chunk_nbytes or 0
    text = (
        f"{per_chunk:,} samples are compressed together in a chunk of {in_bytes(chunk)}: an epoch in uniform "
        f"order, in batches of {place.batch_size:,}, decodes each chunk {epoch.decodes:.3g} times, "
        f"{in_bytes(epoch.nbytes)} instead of {in_bytes(epoch.windowed_nbytes)}"
    )
    group, remedies = chunk * facts.parts, []
    window = min(_WINDOW, _WINDOW_NBYTES // max(group, 1))
    groups = -(-facts.chunks // facts.parts)
    if window >= 1:
        remedies.append(
            f'Shuffle(window={window}, unit="group"), which decodes each chunk once and takes '
            f"{in_bytes(min(window, groups) * group)}"
        )
    if facts.decoded and place.free_memory is not None and facts.decoded <= place.free_memory // 2:
        remedies.append(
            f'cache="ram": decoded the data are {in_bytes(facts.decoded)}, and '
            f"{in_bytes(place.free_memory)} of memory are free"
        )
    alone = "--chunk-rows 1" if nbytes >= _LARGE_ENOUGH else "--codec none"
    remedies.append(place.repack(facts, alone))
    yield Advice(facts.path, "decoded often", text, tuple(remedies))


def _huge_chunks(facts: DatasetFacts, place: _Place) -> Iterator[Advice]:
    chunk, nbytes = facts.chunk_nbytes or 0, facts.sample_nbytes
    if not facts.filters or not nbytes or chunk < _HUGE_CHUNK:
        return
    part = min(nbytes / facts.parts, chunk)
    if part < chunk / 2:
        text = (
            f"its chunks are {in_bytes(chunk)}, of which a sample needs {in_bytes(part)}: whoever reads one "
            f"sample decodes {in_bytes(chunk * facts.parts)}, and each thread needs memory for a chunk"
        )
        yield Advice(facts.path, "huge chunks", text, (place.repack(facts, "--chunk-rows auto"),))


def _cut_samples(facts: DatasetFacts, place: _Place) -> Iterator[Advice]:
    if _is_small(facts) or facts.epoch is None or facts.parts < 2 or not facts.sample_nbytes:
        return
    piece = facts.sample_nbytes / facts.epoch.reads
    if facts.filters:
        is_bad = facts.samples_per_chunk != 1 or (facts.chunk_nbytes or 0) < _SMALL_PART
        what = f"each sample of {in_bytes(facts.sample_nbytes)} is spread over {facts.parts:,} chunks"
    else:
        is_bad = facts.epoch.reads >= _MANY_READS and piece < _SMALL_PART
        what = (
            f"each sample of {in_bytes(facts.sample_nbytes)} is spread over {facts.parts:,} chunks and "
            f"read in {facts.epoch.reads:,} pieces of {in_bytes(piece)}"
        )
    if is_bad:
        text = f"its chunks {facts.chunk} cut the samples' own dimensions: {what}"
        yield Advice(facts.path, "cut samples", text, (place.repack(facts, "--chunk-rows auto"),))


def _tiny_chunks(facts: DatasetFacts, place: _Place) -> Iterator[Advice]:
    chunk = facts.chunk_nbytes
    if _is_small(facts) or not facts.filters or facts.chunks < 2 or not chunk or chunk >= _TINY_CHUNK:
        return
    text = (
        f"its {facts.chunks:,} chunks are of {in_bytes(chunk)}: finding, reading and starting to decode one "
        "costs more than its bytes"
    )
    remedies = place.repack(facts, "--codec none"), place.repack(facts, "--chunk-rows auto")
    yield Advice(facts.path, "tiny chunks", text, remedies)


def _through_library(facts: DatasetFacts, place: _Place) -> Iterator[Advice]:
    if _is_small(facts) or facts.reader != "h5py" or facts.missing:
        return
    text = (
        f"{in_bytes(max(facts.decoded or 0, facts.stored))} are read through h5py, by one thread at a time: "
        f"{facts.why}"
    )
    if "filter" in facts.why or "compressed twice" in facts.why:
        yield Advice(facts.path, "through h5py", text, (place.repack(facts, "--codec lzf"),))
    elif facts.storage in ("virtual", "external"):
        yield Advice(facts.path, "through h5py", text, (place.repack(facts, "--codec none"),))
    elif "never written" in facts.why:
        yield Advice(facts.path, "through h5py", text, (place.repack(facts, "--codec keep"),))
    elif "which chunk" in facts.why:
        remedy = "a file written without libver=, whose list of chunks h5py gets right; or worker processes"
        yield Advice(facts.path, "through h5py", text, (remedy,))
    else:
        remedy = "worker processes, each with an HDF5 library; or elements of a fixed size in NumPy's form"
        yield Advice(facts.path, "through h5py", text, (remedy,))


def _slow_codec(facts: DatasetFacts, place: _Place) -> Iterator[Advice]:
    if _is_small(facts) or DEFLATE not in facts.codes or facts.epoch is None or facts.reader != "threads":
        return
    if _FAST & set(facts.codes):
        return
    text = (
        f"its filter is {facts.filters[facts.codes.index(DEFLATE)]}: an epoch in uniform order inflates "
        f"{in_bytes(facts.epoch.nbytes)}, which lzf, lz4, zstd and blosc decode faster"
    )
    remedies = place.repack(facts, "--codec lzf"), place.repack(facts, "--codec lz4") + " (with hdf5plugin)"
    yield Advice(facts.path, "slow codec", text, remedies)


_RULES: tuple[Callable[[DatasetFacts, _Place], Iterator[Advice]], ...] = (
    _no_samples,
    _missing_plugin,
    _through_library,
    _decoded_often,
    _huge_chunks,
    _cut_samples,
    _tiny_chunks,
    _slow_codec,
)
