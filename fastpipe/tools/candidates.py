"""Find loaders that may be faster: the script's loader with other settings, and other loaders."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Sequence
from types import FunctionType
from typing import Any

from fastpipe.core.machine import free_memory
from fastpipe.core.processes import why_no_processes
from fastpipe.core.text import in_bytes
from fastpipe.options import Cache
from fastpipe.tools import swaps
from fastpipe.tools.costs import LoaderCosts
from fastpipe.tools.edits import Edit
from fastpipe.tools.loaders import Watched, is_fast, is_map_style, processes_of, view_of
from fastpipe.tools.swaps import Candidate, accelerated
from fastpipe.tools.tf_loops import batches_by_threads, is_parallel
from fastpipe.tools.trials import decoded_bytes, folders_behind, is_all_kept, kept
from fastpipe.tools.witness import Account, Reads

_WAITS = 0.3  # fraction of a batch's time: a longer wait justifies a change
_MOST_WORKERS, _MOST_AHEAD = 32, 32
_PART = 0.5  # fraction of the free memory that a cache may take
_KEPT_BATCHES = 16  # number of batches to cache for the measurement


def candidates(
    watched: Watched, costs: LoaderCosts, cores: int, accounts: Sequence[Account] = (),
    reads: Reads | None = None, uneven: str = "",
) -> list[Candidate]:  # fmt: skip
    if reads is not None and accounts:
        return [*swaps.of_tables(watched, costs, reads, accounts[0].batches), *_by_threads(watched, cores)]
    if not hasattr(watched.loader, "num_workers"):
        return []
    if is_fast(watched.loader):
        return [*_of_fast(watched, cores), *of_kept(watched)]
    arrays = list(dict.fromkeys(read for account in accounts for read in account.arrays))
    volumes = list(dict.fromkeys(volume for account in accounts for volume in account.volumes))
    others = _ahead(watched, uneven) if uneven else _workers(watched, costs, cores)
    folders = list(swaps.of_folders(watched, costs))
    return [
        *(folders or swaps.of_images(watched, costs, accounts)),
        *swaps.of_staged(watched, costs), *swaps.of_rows(watched, costs, arrays),
        *swaps.of_volumes(watched, costs, volumes),
        *(() if why_no_processes() else others),
    ]  # fmt: skip


def _ahead(watched: Watched, why: str) -> Iterator[Candidate]:
    loader = watched.loader
    before = loader.prefetch_factor or 2
    wanted = min(_MOST_AHEAD, 4 * before)
    if wanted > before:
        what = f"prefetch_factor={wanted} instead of {before}{watched.place}"
        begin = view_of(loader, prefetch_factor=wanted).__iter__
        edit = Edit(arguments={"prefetch_factor": wanted})
        yield Candidate(what, why, begin, max(2, loader.num_workers), edit=edit)


def _of_fast(watched: Watched, cores: int) -> Iterator[Candidate]:
    loader = watched.loader
    now = processes_of(loader)
    ways: list[tuple[str, str, int, dict[str, Any]]] = [
        ('augment="auto"', "other draws of the same augmentation, made for whole batches", now,
         {"augment": "split"}),
    ]  # fmt: skip
    for workers in dict.fromkeys((0,) if why_no_processes() else (cores, 0)):
        if workers != now and is_map_style(loader.dataset):
            who = (
                "that many processes make batches" if workers else "threads of this process make the batches"
            )
            options = {"num_workers": workers, "workers": "processes"} if workers else {"workers": "threads"}
            what = " and ".join(f"{name}={value!r}" for name, value in options.items())
            ways.append((what, who, workers, options))
    for what, why, workers, options in ways:
        other = accelerated(loader, options)
        if other is not None:
            yield Candidate(
                f"{what}{watched.place}", f"{why}; measured on your data", other.__iter__, max(2, workers)
            )  # fmt: skip


def _by_threads(watched: Watched, cores: int) -> Iterator[Candidate]:
    data = watched.loader
    if hasattr(data, "use_multiprocessing") and not is_parallel(data) and cores > 1:
        yield Candidate(
            f"workers={cores} of {type(data).__name__}, by super().__init__(workers={cores})",
            f"one thread makes its batches; there are {cores} cores; measured on your data",
            functools.partial(batches_by_threads, data, cores), cores,
        )  # fmt: skip


def _workers(watched: Watched, costs: LoaderCosts, cores: int) -> Iterator[Candidate]:
    loader = watched.loader
    if not is_map_style(loader.dataset):
        yield from _workers_of_stream(watched, cores)
        return
    workers, idle = loader.num_workers, costs.read_idle_s / max(costs.wall_s, 1e-9)
    if costs.delay_share > _WAITS and workers > cores:
        wanted = cores
        why = f"of a batch's time, workers wait {costs.delay_share:.0%} for one of {cores} cores"
    elif idle > _WAITS and workers < _MOST_WORKERS:
        wanted = min(_MOST_WORKERS, 4 * max(workers, cores))
        why = f"a batch spends {idle:.0%} of its time waiting for storage"
    elif workers < cores:
        wanted = cores
        why = f"that many processes make batches on {cores} cores"
        if not workers:
            why = "the step and the loader take turns"
    else:
        return
    yield _with_workers(watched, wanted, why)


def _workers_of_stream(watched: Watched, cores: int) -> Iterator[Candidate]:
    workers = watched.loader.num_workers
    if not workers:
        why = "the step and the loader take turns; one process makes the same batches, in their order"
        yield _with_workers(watched, 1, why)
    if max(1, workers) < cores and knows_workers(watched.loader.dataset):
        why = (
            f"that many processes make batches on {cores} cores; the dataset calls get_worker_info(), so it "
            "must give each of them different samples"
        )
        yield _with_workers(watched, cores, why)


def _with_workers(watched: Watched, wanted: int, why: str) -> Candidate:
    loader = watched.loader
    view = view_of(loader, num_workers=wanted, prefetch_factor=loader.prefetch_factor or 2)  # torch's own
    what = f"num_workers={wanted} instead of {loader.num_workers}{watched.place}"
    return Candidate(what, why, view.__iter__, wanted, edit=Edit(arguments={"num_workers": wanted}))


def of_kept(watched: Watched) -> Iterator[Candidate]:
    dataset, free = watched.loader.dataset, free_memory()
    if folders_behind(dataset) != [dataset] or not hasattr(dataset, "cache"):
        return
    nbytes = decoded_bytes(dataset)
    if nbytes is None or free is None or nbytes > _PART * free or is_all_kept(dataset.cache, nbytes):
        return
    cache, loader = Cache("ram", max_bytes=nbytes), watched.loader
    other = copy.copy(dataset)  # the copy creates its own threads
    other.cache = cache

    @functools.cache
    def made() -> Any:
        return kept(loader, other, _KEPT_BATCHES, num_workers=loader.num_workers)

    yield Candidate(
        f"cache={cache!r} of the {type(dataset).__name__}{watched.place}",
        f"all that it decodes is {in_bytes(nbytes)}, and {in_bytes(free)} of memory are free; measured on "
        "some of your samples, from their second epoch on",
        lambda: iter(made()), max(2, loader.num_workers),
    )  # fmt: skip


def knows_workers(dataset: Any, _around: tuple[Any, ...] = ()) -> bool:
    """Return whether an ``IterableDataset`` calls ``get_worker_info`` to divide its data among workers."""
    kinds = [kind for kind in type(dataset).__mro__ if kind.__module__.partition(".")[0] != "torch"]
    functions = [one for kind in kinds for one in vars(kind).values() if isinstance(one, FunctionType)]
    for function in functions:
        called = map(function.__globals__.get, function.__code__.co_names)
        for one in (function, *called):
            if isinstance(one, FunctionType) and "get_worker_info" in one.__code__.co_names:
                return True
    inner = getattr(dataset, "__dict__", {}).values()
    around = (*_around, dataset)  # an inner dataset may refer to an outer dataset
    parts = [one for one in inner if not is_map_style(one) and all(one is not other for other in around)]
    return any(knows_workers(one, around) for one in parts)
