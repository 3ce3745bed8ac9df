"""``generate``: samples of a function, by all cores, stored once, never lost; ``probe``: a look before."""

from __future__ import annotations

import operator
import os
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from fastpipe.generation.columns import Columns
from fastpipe.generation.estimate import ProbeReport, look
from fastpipe.generation.rows import Policy
from fastpipe.generation.run import Generated, Options, Run, first_row
from fastpipe.generation.schedule import Report
from fastpipe.generation.workers import Kind


def generate(
    fn: Callable[..., Any],
    n: int,
    out: str | os.PathLike[str],
    *,
    seed: int,
    workers: int | Literal["auto"] = "auto",
    executor: Executor | Kind | None = None,
    columns: Columns = None,
    chunk_rows: int | Literal["auto"] = "auto",
    resume: bool | Literal["changed"] = True,
    probe: bool = True,
    max_bytes: int | None = None,
    bad_samples: Policy = "raise",
    seed_globals: bool = False,
    progress: bool = True,
) -> Generated:
    """Make samples with a function, and store each once, in an HDF5 file for :class:`FastHDF5Dataset`.

    Row ``i`` is what ``fn(i, np.random.default_rng([seed, i]))`` returns, and depends on nothing else: the
    file is the same for any number of workers, on any executor, and however often it was interrupted.
    Killed, the same call goes on; with a larger ``n`` it makes the rows that are missing.

    Args:
        fn: ``fn(index, rng)`` returns a dict of arrays, numbers, strings or bytes; or a tuple of them, or
            one.  ``index`` is 0 to ``n - 1``, ``rng`` a ``np.random.Generator``.  If there is ``fn.batch``,
            ``fn.batch(indices, rng)`` makes several rows at once: ``indices`` is int64 (B,), ``rng`` has the
            methods of a Generator and gives a row for each, (B, …), and the result has arrays (B, …).
        n: how many rows.
        out: the file.  While it grows there is a folder ``out.partial`` beside it.
        seed: what makes these samples and no others; 0 or more.
        workers: how many rows are made at a time; 0 makes them in this thread.  ``"auto"``: one for each core
            that this process may use, unless a look at the function shows that it gains nothing.
        executor: ``"processes"`` (the default), ``"threads"``, or any ``concurrent.futures.Executor``, such
            as Dask's ``client.get_executor()``; its workers must see the folder of ``out``.
        columns: names for a tuple's values; or for some columns their type, ``str`` or ``"float32"``, or type
            and shape: ``{"motion": ("float32", (None, 25, 3))}``, where ``None`` is a length of each sample's
            own.  Else types and shapes are those of the first row.
        chunk_rows: rows of a chunk; ``"auto"``: as many as make 64 KiB.
        resume: go on with what is there.  False begins anew; ``"changed"`` also goes on if ``fn`` is not what
            it was, for corrections that leave rows as they are.
        probe: look for three seconds at how long it will take, and why, before work that takes long.
        max_bytes: about the size from which on there are several files, ``out-00000.h5`` and so on.
        bad_samples: what happens where ``fn`` raises.  ``"raise"`` stops, keeping all rows before; ``"skip"``
            leaves the row out of the file; ``"retry"`` calls again with other random numbers, ten times.
        seed_globals: seed ``random``, ``np.random`` and torch for each row, for code that draws from them.
        progress: show how far it is, on standard error; a bar in a terminal.

    Returns:
        What was made.

    Ragged columns are padded with zeros to the longest; their lengths are in ``NAME_length``.  NaN are kept,
    and counted.  Libraries use one thread each while rows are made, so that sums come out the same anywhere.

    Raises:
        GenerationError: a row failed; or what is there is of another function, seed or number of rows.
        OptionError: an option cannot work, or ``out`` is something else.
        OSError: the disk is full, for instance; the same call goes on.
        KeyboardInterrupt: rows that were begun were finished and kept; a second one does not wait for them.

    >>> import h5py, os, tempfile
    >>> def sample(index, rng):
    ...     return {"wave": rng.normal(size=8).astype("float32"), "index": index}
    >>> folder = tempfile.TemporaryDirectory()
    >>> path = os.path.join(folder.name, "waves.h5")
    >>> made = generate(sample, 100, path, seed=0, progress=False)
    >>> with h5py.File(path) as file:
    ...     file["wave"].shape, int(file["index"][99])
    ((100, 8), 99)
    >>> folder.cleanup()
    """
    begun = time.monotonic()
    options = Options(
        fn, operator.index(n), Path(out).absolute(), operator.index(seed), workers, executor, columns,
        None if chunk_rows == "auto" else chunk_rows, resume, probe, max_bytes, bad_samples, seed_globals,
    )  # fmt: skip
    with Report(Path(out).name, options.rows, is_shown=progress) as report:
        made = Run(options, report).run()
        made = replace(made, seconds=time.monotonic() - begun)
        report.say(str(made))
    return made


def probe(
    fn: Callable[..., Any],
    n: int,
    out: str | os.PathLike[str] = "rows.h5",
    *,
    seed: int = 0,
    workers: int | Literal["auto"] = "auto",
    executor: Kind | None = None,
    columns: Columns = None,
    seed_globals: bool = False,
) -> ProbeReport:
    """Say how long ``generate`` will take, how large the file will be, why, and what workers bring.

    Makes rows for about three seconds, and keeps none.

    Args:
        fn, n, out, seed, workers, executor, columns, seed_globals: as of :func:`fastpipe.generate`.

    Returns:
        What was measured; ``print`` it.

    Raises:
        As ``generate``.

    >>> found = probe(lambda index, rng: rng.normal(size=100), 1000, workers=1, executor="threads")
    >>> found.rows, found.row_nbytes, found.seconds > 0
    (1000, 800, True)
    """
    options = Options(fn, n, Path(out), seed, workers, executor, columns, seeds_globals=seed_globals)
    first = first_row(options)
    task, are_threads = options.task(first.schema, first.batch_rows), executor == "threads"
    return look(task, n, first.row_nbytes, options.most_workers, are_threads, options.out)
