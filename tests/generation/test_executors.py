"""One file, whoever makes it: this thread, processes, threads, executors of the standard library, a cluster."""

from __future__ import annotations

import functools
import multiprocessing
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest
from generated import contents, failing_in, made
from scripts import ran
from threadpoolctl import threadpool_info, threadpool_limits

from fastpipe.errors import GenerationError, OptionError
from fastpipe.generation import schedule
from fastpipe.generation.workers import OneThreadEach

N = 400
RAGGED = {"r": ("int64", (None,))}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many blocks that they come in another order each time, and begin elsewhere."""
    monkeypatch.setattr(schedule, "_BLOCK_S", 0.01)
    monkeypatch.setattr(schedule, "_LEAST_BLOCK_S", 0.001)


def kept_rows(error: GenerationError) -> int:
    """How many rows are kept, as the message says."""
    found = re.search(r"([\d,]+) of [\d,]+ rows are kept", str(error))
    assert found, error
    return int(found[1].replace(",", ""))


# Functions go to other processes by their content, as they are no module's.


def sums() -> Callable[..., Any]:
    """Its last bits depend on how many threads add: rows have a product of matrices."""

    def sample(index: int, rng: np.random.Generator) -> dict[str, Any]:
        matrix = rng.normal(size=(60, 60)).astype("f4")
        return {"sum": (matrix @ matrix.T).sum(0), "index": index, "half": np.float16(index)}

    return sample


def ragged() -> Callable[..., Any]:
    def sample(index: int, rng: np.random.Generator) -> dict[str, Any]:
        some, text = rng.bytes(int(rng.integers(5))), "wäve " * (index % 3)
        return {"r": np.arange(index % 7), "text": text, "bytes": some, "x": rng.normal(size=(3, 2))}

    return sample


def batched() -> Callable[..., Any]:
    """Its last bits depend on a row's company, as those of a product of matrices do."""

    def sample(index: int, rng: np.random.Generator) -> dict[str, Any]:
        return {"x": rng.normal(size=3), "count": rng.integers(9), "r": np.arange(index % 3)}

    def batch(indices: np.ndarray, rng: Any) -> dict[str, Any]:
        x = rng.normal(size=3) + 1e-9 * (len(indices) + indices[0] / 1024)
        return {"x": x, "count": rng.integers(9), "r": [np.arange(index % 3) for index in indices]}

    sample.batch = batch  # type: ignore[attr-defined]
    return sample


def failing_batches() -> Callable[..., Any]:
    def sample(index: int, rng: np.random.Generator) -> dict[str, Any]:
        x = rng.integers(100)
        if np.any(x == 3):
            raise ValueError("no scene")
        return {"x": x, "index": index}

    sample.batch = sample  # type: ignore[attr-defined]
    return sample


some_failing = functools.partial(failing_in, range(N), 14)
JOBS: dict[str, tuple[Callable[[], Callable[..., Any]], dict[str, Any]]] = {
    "sums": (sums, {}),
    "ragged": (ragged, {"columns": RAGGED}),
    "files": (ragged, {"columns": RAGGED, "max_bytes": 12_000}),
    "batches": (batched, {"columns": RAGGED}),
    "batches in files": (batched, {"columns": RAGGED, "max_bytes": 8_000}),
    "skip": (some_failing, {"columns": RAGGED, "bad_samples": "skip"}),
    "skip in files": (some_failing, {"columns": RAGGED, "bad_samples": "skip", "max_bytes": 5_000}),
    "retry": (some_failing, {"columns": RAGGED, "bad_samples": "retry"}),
    "batches, skip": (failing_batches, {"bad_samples": "skip"}),
    "batches, retry": (failing_batches, {"bad_samples": "retry"}),
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], SimpleNamespace]:
    """A job's files as this thread makes them, once."""

    @functools.cache
    def get(job: str) -> SimpleNamespace:
        make, options = JOBS[job]
        fn = make()
        whole = made(fn, tmp_path_factory.mktemp("reference") / "x.h5", N, **options)
        assert (len(whole.paths) > 1) == ("max_bytes" in options) and bool(whole.failed) == ("skip" in job)
        return SimpleNamespace(fn=fn, options=options, files=contents(whole), failed=whole.failed)

    return get


@pytest.fixture(scope="module")
def spawned() -> Iterator[Executor]:
    """Processes of the standard library."""
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        tasks = [pool.submit(abs, -1) for _ in range(2)]  # they start with a task that finds none idle
        assert [task.result() for task in tasks] == [1, 1] and len(pool._processes) == 2
        yield pool


@pytest.fixture(scope="module")
def dask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Executor]:
    """Two worker processes of a Dask cluster."""
    distributed = pytest.importorskip("distributed", reason="pip install 'distributed' to test clusters")
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, host="127.0.0.1", dashboard_address="127.0.0.1:0",
            local_directory=str(tmp_path_factory.mktemp("dask")),
        ) as cluster,
        distributed.Client(cluster) as client,
    ):  # fmt: skip
        made(sums(), tmp_path_factory.mktemp("warm") / "x.h5", 50, executor=client.get_executor())
        yield client.get_executor()


MAKERS: dict[str, dict[str, Any]] = {
    "a process": {"workers": 1}, "processes": {"workers": 2}, "threads": {"workers": 3, "executor": "threads"},
    "a pool of threads": {}, "spawned": {}, "dask": {},
}  # fmt: skip
# Every day each maker has some of the jobs, and each job one or two makers.
_CASES = [
    pytest.param(who, job, id=f"{who}-{job}", marks=() if (at + 3 * number) % 5 == 0 else pytest.mark.slow)
    for at, who in enumerate(MAKERS)
    for number, job in enumerate(JOBS)
]


@pytest.fixture(scope="module")
def maker(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """Options of ``generate``; processes of others are there before a test begins, and stay."""
    if MAKERS[request.param]:
        yield MAKERS[request.param]
    elif request.param == "a pool of threads":
        all_begun = threading.Barrier(3)
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(lambda _: all_begun.wait(), range(3)))
            yield {"executor": pool}
    else:
        yield {"executor": request.getfixturevalue(request.param)}


@pytest.mark.few(4)
@pytest.mark.parametrize(("maker", "job"), _CASES, indirect=["maker"])
def test_files_are_this_threads(tmp_path: Path, maker: dict[str, Any], job: str, reference: Any) -> None:
    wanted = reference(job)
    found = made(wanted.fn, tmp_path / "x.h5", N, **wanted.options, **maker)
    assert contents(found) == wanted.files and found.failed == wanted.failed
    assert sorted(tmp_path.iterdir()) == sorted(found.paths)
    if isinstance(maker.get("executor"), Executor):
        assert maker["executor"].submit(abs, -1).result() == 1, "it is still the caller's"


def test_one_maker_finishes_what_another_has_begun(tmp_path: Path, spawned: Executor) -> None:
    inner, stop, path, kept = ragged(), tmp_path / "stop", tmp_path / "x.h5", 0

    def sample(index: int, rng: np.random.Generator) -> dict[str, Any]:
        if stop.exists() and index >= 100 * int(stop.read_text()):
            raise RuntimeError("enough")
        return inner(index, rng)  # type: ignore[no-any-return]

    options = {"columns": RAGGED, "chunk_rows": 16}
    whole = made(sample, tmp_path / "whole.h5", N, **options)
    for part, who in enumerate(({"workers": 0}, {"executor": spawned}, {"workers": 2}), start=1):
        stop.write_text(str(part))
        before = kept
        with pytest.raises(GenerationError, match=r"RuntimeError: enough.* of 350 rows are kept") as caught:
            made(sample, path, 350, **options, **who)
        kept = kept_rows(caught.value)
        assert before <= kept <= 100 * part
    stop.unlink()
    assert kept > 0 and made(sample, path, 350, **options, workers=2).made == 350 - kept
    grown = made(sample, path, N, executor=spawned, **options)
    assert grown.made == 50 and contents(grown) == contents(whole)


@pytest.mark.parametrize(
    ("index", "maker"),
    [(0, "spawned"), (1, "dask"), (331, "spawned"), (331, "threads"), (331, "processes")],
    indirect=["maker"],
)
def test_a_row_that_raises_elsewhere_is_named(tmp_path: Path, index: int, maker: dict[str, Any]) -> None:
    def sample(at: int, rng: np.random.Generator) -> dict[str, Any]:
        if at == index and not (tmp_path / "mended").exists():
            raise SystemExit("no licence")
        return {"x": rng.normal(size=3), "text": str(at)}

    with pytest.raises(GenerationError, match=f"row {index} failed: SystemExit: no licence") as caught:
        made(sample, tmp_path / "x.h5", N, **maker)
    assert caught.value.index == index
    (tmp_path / "mended").touch()
    found = made(sample, tmp_path / "x.h5", N, **maker)
    # Without its first row a job does not begin.  Of others, blocks that were not begun are not kept.
    assert found.made == N - (kept_rows(caught.value) if index else 0)
    with h5py.File(found.paths[0]) as file:
        assert file["text"].asstr()[:].tolist() == list(map(str, range(N)))
    assert {path.name for path in tmp_path.iterdir()} == {"x.h5", "mended"}


def test_a_block_whose_first_row_fails_is_empty(tmp_path: Path) -> None:
    def sample(index: int, rng: np.random.Generator) -> dict[str, Any]:
        if index and not (tmp_path / "mended").exists():
            raise KeyError("scene")
        return {"x": rng.normal(size=3), "r": np.arange(index), "text": str(index)}

    with ThreadPoolExecutor(2) as pool:
        with pytest.raises(GenerationError, match=r"row [0-9]+ failed: KeyError: 'scene'"):
            made(sample, tmp_path / "x.h5", 40, executor=pool, columns=RAGGED)
        (tmp_path / "mended").touch()
        found = made(sample, tmp_path / "x.h5", 40, executor=pool, columns=RAGGED)
    with h5py.File(found.paths[0]) as file:
        assert file["r_length"][:].tolist() == list(range(40))
    with pytest.raises(GenerationError, match=r"cannot schedule new futures.* 0 of 40 rows are kept"):
        made(sample, tmp_path / "y.h5", 40, executor=pool, columns=RAGGED)  # which was shut down


def test_an_executor_whose_process_dies_is_an_error(tmp_path: Path) -> None:
    """The standard library's executor is broken then, and does not say which task it was."""

    def sample(index: int, rng: np.random.Generator) -> dict[str, Any]:
        if index == 300 and not (tmp_path / "mended").exists():
            os._exit(3)
        return {"x": rng.normal(size=3)}

    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        with pytest.raises(GenerationError, match=r"BrokenProcessPool.* rows are kept in"):
            made(sample, tmp_path / "x.h5", N, executor=pool)
    (tmp_path / "mended").touch()
    found, alone = (made(sample, tmp_path / f"{name}.h5", N) for name in "xy")
    assert contents(found) == contents(alone)


def test_missing_modules_are_named(
    tmp_path: Path, spawned: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_here_scenes.py").write_text("def sample(index, rng):\n    return {'x': index}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    sample = __import__("only_here_scenes").sample
    with pytest.raises(GenerationError, match="No module named 'only_here_scenes'") as caught:
        made(sample, tmp_path / "x.h5", N, executor=spawned)
    assert "a worker cannot make rows" in str(caught.value) and "0 of 400 rows" in str(caught.value)
    # Own processes look where this one does; paths in it may have braces, and be no strings.
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path / "{scenes}", str(tmp_path / "{more}")])
    assert made(sample, tmp_path / "x.h5", N, workers=2).rows == N
    sys.modules.pop("only_here_scenes")


def test_a_lock_or_open_file_of_a_closure_cannot_go_to_processes(tmp_path: Path, spawned: Executor) -> None:
    (tmp_path / "scene.bin").write_bytes(bytes(100))

    def using(thing: Any) -> Callable[..., Any]:
        def sample(index: int, rng: np.random.Generator) -> dict[str, Any]:
            return {"x": rng.random(), "is_there": thing is not None}

        return sample

    with open(tmp_path / "scene.bin", "r+b") as file:
        for thing in (threading.Lock(), file):
            for who in ({"workers": 2}, {"executor": spawned}):
                with pytest.raises(OptionError, match="sample cannot be sent to another process") as caught:
                    made(using(thing), tmp_path / "x.h5", N, **who)
                for words in ("Open files, locks", "within the function", "workers=0", "executor='threads'"):
                    assert words in str(caught.value)
            # What it left is no obstacle for threads, or for another function, as nothing is in it.
            other = using(None) if thing is file else using(thing)
            assert made(other, tmp_path / "x.h5", N, workers=2, executor="threads").made == N
            (tmp_path / "x.h5").unlink()


def test_blocks_side_by_side_leave_libraries_their_threads(tmp_path: Path) -> None:
    def threads_of_libraries() -> set[int]:
        return {one["num_threads"] for one in threadpool_info() if one["user_api"] == "blas"}

    with threadpool_limits(2):
        first, second = OneThreadEach(), OneThreadEach()
        first.__exit__(None, None, None)
        assert threads_of_libraries() == {1}, "the second is not done"
        second.__exit__(None, None, None)
        assert threads_of_libraries() == {2}
        made(sums(), tmp_path / "x.h5", 50, executor="threads", workers=2)
        assert threads_of_libraries() == {2}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_function_may_change_folder(tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("work", "elsewhere"):
        (tmp_path / name).mkdir()
    elsewhere = str(tmp_path / "elsewhere")

    def sample(index: int, rng: np.random.Generator) -> dict[str, Any]:
        os.chdir(elsewhere)
        return {"x": index, "text": str(index)}

    monkeypatch.chdir(tmp_path / "work")
    assert made(sample, Path("x.h5"), 50, workers=workers).rows == 50
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["x.h5"]
    assert not list((tmp_path / "elsewhere").iterdir())


class Odd(ThreadPoolExecutor):
    """Cancels every third task, as a cluster that loses a worker, or sends it otherwise than it was made."""

    def __init__(self, is_cancelled: bool) -> None:
        super().__init__(1)
        self._count, self._is_cancelled = 0, is_cancelled
        self.waiting: list[int] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self._count += 1
        self.waiting.append(self._work_queue.qsize())
        if self._count % 3:
            return super().submit(fn, *args, **kwargs)
        if not self._is_cancelled:
            return super().submit(self._damaged, fn, *args, **kwargs)
        future: Future[Any] = Future()
        future.cancel()
        future.set_running_or_notify_cancel()
        return future

    def _damaged(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        done = fn(*args, **kwargs)
        content, crc = done.sent
        return replace(done, sent=(content[:-9] + bytes(9), crc))


def test_a_task_that_a_cluster_cancels_is_submitted_again(tmp_path: Path, reference: Any) -> None:
    wanted = reference("sums")
    with Odd(is_cancelled=True) as executor:
        found = made(wanted.fn, tmp_path / "x.h5", N, executor=executor, workers=2, **wanted.options)
    assert contents(found) == wanted.files
    assert len(executor.waiting) > 4 and max(executor.waiting) <= 4, "workers= so many at a time"


def test_a_block_that_arrives_otherwise_is_not_kept(tmp_path: Path) -> None:
    def sample(index: int, rng: np.random.Generator) -> dict[str, Any]:
        return {"x": rng.normal(size=3), "r": np.arange(1 + index % 7)}

    with Odd(is_cancelled=False) as executor:
        with pytest.raises(GenerationError, match=r"rows \d+ to \d+ did not arrive as .* checksums differ"):
            made(sample, tmp_path / "x.h5", N, executor=executor, columns=RAGGED)
    found, alone = (made(sample, tmp_path / f"{name}.h5", N, columns=RAGGED) for name in "xy")
    assert contents(found) == contents(alone)


_LATE = """
import sys
import threadpoolctl
from fastpipe import generate

def sample(index, rng):
    import scipy.linalg  # which has a BLAS of its own
    if index == 30 and sys.argv[1] == "stops":
        raise ValueError("enough")
    found = threadpoolctl.threadpool_info()
    return {"threads": max(one["num_threads"] for one in found), "libraries": len(found)}

options = {"executor": sys.argv[2]} if sys.argv[2] != "0" else {}
generate(sample, 60, "x.h5", seed=0, workers=int(sys.argv[3]), progress=False, **options)
print({one["num_threads"] for one in threadpoolctl.threadpool_info() if one["user_api"] == "blas"})
"""


@pytest.mark.few(1)
@pytest.mark.parametrize(("executor", "workers"), [("0", "0"), ("threads", "2"), ("processes", "2")])
def test_libraries_that_rows_load_have_one_thread_too(
    tmp_path: Path, executor: str, workers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "script.py").write_text(_LATE)
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "2")
    # The second run has no first row in which the library could have been loaded before those that are kept.
    runs = [ran("script.py", how, executor, workers, cwd=tmp_path) for how in ("stops", "goes on")]
    found = [(done.returncode, done.stdout) for done in runs]
    assert found == [(1, ""), (0, "{2}\n")], "which has its threads afterwards"
    with h5py.File(tmp_path / "x.h5") as file:
        assert set(file["threads"][:]) == {1} and file["libraries"][:].min() >= 2


def test_workers_have_arguments_and_options_of_their_parent(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import sys\n"
        "from fastpipe import generate\n"
        "def sample(index, rng):\n"
        "    assert index < 0\n"
        "    flags = sys.flags\n"
        "    return {'optimize': flags.optimize, 'utf8': flags.utf8_mode, 'argument': sys.argv[1]}\n"
        "generate(sample, 40, 'x.h5', seed=0, workers=2, progress=False)\n"
    )
    assert ran("-O", "-X", "utf8", "script.py", "{it's}", cwd=tmp_path).returncode == 0
    with h5py.File(tmp_path / "x.h5") as file:
        assert set(file["optimize"][:]) == {1} and set(file["utf8"][:]) == {1}
        assert set(file["argument"].asstr()[:]) == {"{it's}"}
