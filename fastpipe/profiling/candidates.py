"""Other settings of a loader, and other loaders in its place, each ready to be measured."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

from fastpipe.core.processes import why_no_processes
from fastpipe.profiling._torch_view import view_of
from fastpipe.profiling.candidate import Candidate, place_of
from fastpipe.profiling.costs import LoaderCosts
from fastpipe.profiling.images_read import ImageReads
from fastpipe.profiling.keeping import of_kept
from fastpipe.profiling.keras_data import batches_by_threads, is_parallel
from fastpipe.profiling.near import of_staged
from fastpipe.profiling.swap_images import of_images
from fastpipe.profiling.swaps import accelerated, of_folders, of_rows, of_tables, of_volumes
from fastpipe.profiling.timed import Account
from fastpipe.profiling.watching import Watched, is_fast, is_map_style, processes_of
from fastpipe.profiling.worker_info import uses_worker_info

__all__ = ["candidates"]

_WAITS = 0.3  # from this part of a batch's time on, waiting is worth doing something about
_MOST_WORKERS, _MOST_AHEAD = 32, 32


def candidates(
    watched: Watched,
    costs: LoaderCosts,
    cores: int,
    accounts: Sequence[Account] = (),
    images: ImageReads | None = None,
    uneven: str = "",
) -> list[Candidate]:
    """What may be faster than a loader of torch's, for what is known of its costs.

    Args:
        watched: the loader.
        costs: of its batches.
        cores: that this process may use.
        accounts: of the processes that made them.
        images: that were opened with Pillow; None where that was not looked at.
        uneven: by which measurement workers are fast enough, but their batches not always there in time.
    """
    if images is not None and accounts:
        return [*of_tables(watched, costs, images, accounts[0].batches), *_by_threads(watched, cores)]
    if not hasattr(watched.loader, "num_workers"):
        return []
    if is_fast(watched.loader):
        return [*_of_fast(watched, cores), *of_kept(watched)]
    arrays = list(dict.fromkeys(read for account in accounts for read in account.arrays))
    volumes = list(dict.fromkeys(volume for account in accounts for volume in account.volumes))
    if uneven:
        return list(_ahead(watched, uneven))
    folders = list(of_folders(watched, costs))
    return [
        *(folders or of_images(watched, costs, accounts)),
        *of_staged(watched, costs), *of_rows(watched, costs, arrays),
        *of_volumes(watched, costs, volumes),
        *(() if why_no_processes() else _workers(watched, costs, cores)),
    ]  # fmt: skip


def _ahead(watched: Watched, why: str) -> Iterator[Candidate]:
    """More batches ahead, for such that take unequally long."""
    loader = watched.loader
    before = loader.prefetch_factor or 2
    wanted = min(_MOST_AHEAD, 4 * before)
    if wanted > before:
        view = view_of(loader, prefetch_factor=wanted)
        what = f"prefetch_factor={wanted} in the place of {before}{place_of(watched)}"
        yield Candidate(what, why, view.__iter__, max(2, loader.num_workers))


def _of_fast(watched: Watched, cores: int) -> Iterator[Candidate]:
    """A loader of fastpipe's with its batches made in processes, or without any; and its transform split."""
    loader = watched.loader
    now = processes_of(loader)
    ways: list[tuple[str, str, int, dict[str, Any]]] = [
        ('augment="auto"', "other draws of the same augmentation, made for whole batches", now,
         {"augment": "split"}),
    ]  # fmt: skip
    for workers in dict.fromkeys((0,) if why_no_processes() else (cores, 0)):
        if workers != now and is_map_style(loader.dataset):
            who = "so many processes make batches" if workers else "threads of this process make the batches"
            options = {"num_workers": workers, "workers": "processes"} if workers else {"workers": "threads"}
            what = " and ".join(f"{name}={value!r}" for name, value in options.items())
            ways.append((what, who, workers, options))
    for what, why, workers, options in ways:
        other = accelerated(loader, options)
        if other is not None:
            yield Candidate(
                f"{what}{place_of(watched)}", f"{why}; measured on your data", other.__iter__, max(2, workers)
            )  # fmt: skip


def _by_threads(watched: Watched, cores: int) -> Iterator[Candidate]:
    """More threads for a dataset of Keras's that makes its batches in one."""
    data = watched.loader
    if hasattr(data, "use_multiprocessing") and not is_parallel(data) and cores > 1:
        yield Candidate(
            f"workers={cores} of {type(data).__name__}, by super().__init__(workers={cores})",
            f"one thread makes its batches, and there are {cores} cores; measured on your data",
            functools.partial(batches_by_threads, data, cores), cores,
        )  # fmt: skip


def _workers(watched: Watched, costs: LoaderCosts, cores: int) -> Iterator[Candidate]:
    """More worker processes, or fewer."""
    loader = watched.loader
    if not is_map_style(loader.dataset):
        yield from _workers_of_stream(watched, cores)
        return
    workers, idle = loader.num_workers, costs.read_idle_s / max(costs.wall_s, 1e-9)
    if costs.delay_share > _WAITS and workers > cores:
        wanted = cores
        why = f"of a batch's time workers wait {costs.delay_share:.0%} for one of {cores} cores"
    elif idle > _WAITS and workers < _MOST_WORKERS:
        wanted = min(_MOST_WORKERS, 4 * max(workers, cores))
        why = f"a batch waits {idle:.0%} of its time for storage"
    elif workers < cores:
        wanted = cores
        why = f"so many processes make batches, and there are {cores} cores"
        if not workers:
            why = "the step and the loader take turns"
    else:
        return
    yield _with_workers(watched, wanted, why)


def _workers_of_stream(watched: Watched, cores: int) -> Iterator[Candidate]:
    """One worker process, which makes what is made now, or as many as there are cores for a dataset that
    knows of them; of any other each would make all samples."""
    workers = watched.loader.num_workers
    if not workers:
        why = "the step and the loader take turns; one process makes the same batches, in their order"
        yield _with_workers(watched, 1, why)
    if max(1, workers) < cores and uses_worker_info(watched.loader.dataset):
        why = (
            f"so many processes make batches, and there are {cores} cores; its code asks for "
            "get_worker_info(), by which it has to give each of them other samples"
        )
        yield _with_workers(watched, cores, why)


def _with_workers(watched: Watched, wanted: int, why: str) -> Candidate:
    """The loader with another number of worker processes."""
    loader = watched.loader
    prefetch = loader.prefetch_factor or 2  # as torch has it
    view = view_of(loader, num_workers=wanted, prefetch_factor=prefetch)
    what = f"num_workers={wanted} in the place of {loader.num_workers}{place_of(watched)}"
    return Candidate(what, why, view.__iter__, wanted)
