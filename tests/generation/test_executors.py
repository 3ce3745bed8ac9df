"""One file, whoever makes it: no worker, one, two, threads, executors of the standard library, a cluster."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import re
import subprocess
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
from threadpoolctl import threadpool_info, threadpool_limits

from fastpipe.errors import GenerationError, OptionError
from fastpipe.generation import Generated, generate, schedule
from fastpipe.generation.workers import OneThreadEach

_N = 700
_RAGGED = {"r": ("int64", (None,))}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many blocks that they come in another order each time, and begin elsewhere."""
    monkeypatch.setattr(schedule, "_BLOCK_S", 0.01)
    monkeypatch.setattr(schedule, "_LEAST_BLOCK_S", 0.001)


def made(fn: Callable[..., Any], path: Path, n: int = _N, **options: Any) -> Generated:
    return generate(fn, n, path, **{"seed": 7, "progress": False, **options})


def digests(found: Generated) -> list[tuple[str, str]]:
    return [
        (path.name.rpartition("-")[2], hashlib.sha256(path.read_bytes()).hexdigest()) for path in found.paths
    ]


def kept_rows(error: GenerationError) -> int:
    """How many rows are kept, as the message says."""
    found = re.search(r"([\d,]+) of [\d,]+ rows are kept", str(error))
    assert found, error
    return int(found[1].replace(",", ""))


def nothing_but(folder: Path, found: Generated) -> bool:
    return sorted(folder.iterdir()) == sorted(found.paths)


# ---- jobs: what is made, by a function that goes to other processes by its content -----------------


def sums() -> Callable[..., Any]:
    """Its last bits depend on how many threads add: rows have a product of matrices."""

    def sample(index: int, rng: np.random.Generator) -> dict[str, Any]:
        matrix = rng.normal(size=(60, 60)).astype("f4")
        return {"sum": (matrix @ matrix.T).sum(0), "index": index, "half": np.float16(index)}

    return sample


def ragged() -> Callable[..., Any]:
    def sample(index: int, rng: np.random.Generator) -> dict[str, Any]:
        return {
            "r": np.arange(index % 7),
            "text": "wäve " * (index % 3),
            "bytes": rng.bytes(int(rng.integers(5))),
            "x": rng.normal(size=(3, 2)),
        }

    return sample


def batched() -> Callable[..., Any]:
    """Its last bits depend on a row's company, as those of a product of matrices do."""

    def sample(index: int, rng: np.random.Generator) -> dict[str, Any]:
        return {"x": rng.normal(size=3), "count": rng.integers(9), "r": np.arange(index % 3)}

    def batch(indices: np.ndarray, rng: Any) -> dict[str, Any]:
        company = 1e-9 * (len(indices) + indices[0] / 1024)
        x = rng.normal(size=3) + company
        return {"x": x, "count": rng.integers(9), "r": [np.arange(index % 3) for index in indices]}

    sample.batch = batch  # type: ignore[attr-defined]
    return sample


def failing() -> Callable[..., Any]:
    def sample(index: int, rng: np.random.Generator) -> dict[str, Any]:
        x = rng.integers(100)
        if x < 15:
            raise ValueError(f"no scene of {x}")
        return {"x": x, "r": np.arange(index % 4), "index": index}

    return sample


def failing_batches() -> Callable[..., Any]:
    def sample(index: int, rng: np.random.Generator) -> dict[str, Any]:
        x = rng.integers(100)
        if x == 3:
            raise ValueError("no scene")
        return {"x": x, "index": index}

    def batch(indices: np.ndarray, rng: Any) -> dict[str, Any]:
        x = rng.integers(100)
        if (x == 3).any():
            raise ValueError("no scenes")
        return {"x": x, "index": indices}

    sample.batch = batch  # type: ignore[attr-defined]
    return sample


JOBS: dict[str, tuple[Callable[[], Callable[..., Any]], dict[str, Any]]] = {
    "sums": (sums, {}),
    "ragged": (ragged, {"columns": _RAGGED}),
    "files": (ragged, {"columns": _RAGGED, "max_bytes": 12_000}),
    "batches": (batched, {"columns": _RAGGED}),
    "batches in files": (batched, {"columns": _RAGGED, "max_bytes": 8_000}),
    "skip": (failing, {"columns": _RAGGED, "bad_samples": "skip"}),
    "skip in files": (failing, {"columns": _RAGGED, "bad_samples": "skip", "max_bytes": 5_000}),
    "retry": (failing, {"columns": _RAGGED, "bad_samples": "retry"}),
    "batches, skip": (failing_batches, {"bad_samples": "skip"}),
    "batches, retry": (failing_batches, {"bad_samples": "retry"}),
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], SimpleNamespace]:
    """A job's file as this thread makes it, once."""
    found: dict[str, SimpleNamespace] = {}

    def get(job: str) -> SimpleNamespace:
        if job not in found:
            make, options = JOBS[job]
            fn, folder = make(), tmp_path_factory.mktemp("reference")
            whole = made(fn, folder / "x.h5", workers=0, **options)
            assert len(whole.paths) > 1 if "max_bytes" in options else len(whole.paths) == 1
            assert bool(whole.failed) == ("skip" in job)
            found[job] = SimpleNamespace(fn=fn, options=options, files=digests(whole), failed=whole.failed)
        return found[job]

    return get


# ---- who makes them ------------------------------------------------------------------------------


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


@pytest.fixture(scope="module", params=["spawned", "dask"])
def elsewhere(request: pytest.FixtureRequest) -> Executor:
    """Processes of others; they are there before a test begins, and stay."""
    executor: Executor = request.getfixturevalue(request.param)
    return executor


@pytest.mark.parametrize(
    ("who", "job"),
    [
        *(({"workers": 1}, job) for job in ("sums", "batches in files", "skip")),
        *(({"workers": 2}, job) for job in JOBS),
        *(({"workers": 3, "executor": "threads"}, job) for job in JOBS),
    ],
    ids=str,
)
def test_own_workers(
    tmp_path: Path, job: str, who: dict[str, Any], reference: Callable[[str], SimpleNamespace]
) -> None:
    wanted = reference(job)
    found = made(wanted.fn, tmp_path / "x.h5", **wanted.options, **who)
    assert digests(found) == wanted.files and found.failed == wanted.failed
    assert nothing_but(tmp_path, found)


@pytest.mark.parametrize("job", JOBS)
def test_processes_of_others(
    tmp_path: Path, job: str, elsewhere: Executor, reference: Callable[[str], SimpleNamespace]
) -> None:
    wanted = reference(job)
    found = made(wanted.fn, tmp_path / "x.h5", executor=elsewhere, **wanted.options)
    assert digests(found) == wanted.files and found.failed == wanted.failed
    assert nothing_but(tmp_path, found)


@pytest.mark.parametrize("job", JOBS)
def test_threads_of_others(tmp_path: Path, job: str, reference: Callable[[str], SimpleNamespace]) -> None:
    wanted = reference(job)
    with ThreadPoolExecutor(3) as pool:
        found = made(wanted.fn, tmp_path / "x.h5", executor=pool, **wanted.options)
        assert pool.submit(abs, -1).result() == 1  # it is the caller's still
    assert digests(found) == wanted.files and found.failed == wanted.failed
    assert nothing_but(tmp_path, found)


def test_what_one_has_begun_another_finishes(tmp_path: Path, elsewhere: Executor) -> None:
    """From no worker to somebody's executor to processes, and on to more rows."""
    job, path, kept = JOBS["ragged"], tmp_path / "x.h5", 0
    inner, stop = job[0](), tmp_path / "stop"

    def sample(index: int, rng: np.random.Generator) -> dict[str, Any]:
        if stop.exists() and index >= 150 * int(stop.read_text()):
            raise RuntimeError("enough")
        return inner(index, rng)

    options = {**job[1], "chunk_rows": 16}
    whole = made(sample, tmp_path / "whole.h5", workers=0, **options)
    for part, who in enumerate(({"workers": 0}, {"executor": elsewhere}, {"workers": 2}), start=1):
        stop.write_text(str(part))
        before = kept
        with pytest.raises(GenerationError, match=r"RuntimeError: enough.* of 650 rows are kept") as caught:
            made(sample, path, 650, **options, **who)
        kept = kept_rows(caught.value)
        assert before <= kept <= 150 * part
    stop.unlink()
    first = made(sample, path, 650, **options, workers=2)
    assert kept > 0 and first.made == 650 - kept
    grown = made(sample, path, executor=elsewhere, **options)
    assert grown.made == 50
    assert digests(grown)[0][1] == digests(whole)[0][1]


# ---- what is particular to each --------------------------------------------------------------------


@pytest.mark.parametrize("index", [0, 1, 431])
def test_a_row_that_raises_elsewhere_is_named(tmp_path: Path, index: int, elsewhere: Executor) -> None:
    def sample(at: int, rng: np.random.Generator) -> dict[str, Any]:
        if at == index and not (tmp_path / "mended").exists():
            raise KeyError("scene")
        return {"x": rng.normal(size=3), "text": str(at)}

    with pytest.raises(GenerationError, match=f"row {index} failed: KeyError: 'scene'") as caught:
        made(sample, tmp_path / "x.h5", executor=elsewhere)
    assert caught.value.index == index
    (tmp_path / "mended").touch()
    found = made(sample, tmp_path / "x.h5", executor=elsewhere)
    # Without its first row a job does not begin.  Of others, blocks that nobody had begun are not kept.
    assert found.made == _N - (kept_rows(caught.value) if index else 0)
    with h5py.File(found.paths[0]) as file:
        assert file["text"].asstr()[:].tolist() == list(map(str, range(_N)))
    assert {path.name for path in tmp_path.iterdir()} == {"x.h5", "mended"}


def test_a_failed_first_row_of_a_block_leaves_an_empty_block(tmp_path: Path) -> None:
    def sample(index: int, rng: np.random.Generator) -> dict[str, Any]:
        if index and not (tmp_path / "mended").exists():
            raise KeyError("scene")
        return {"x": rng.normal(size=3), "r": np.arange(index), "text": str(index)}

    with ThreadPoolExecutor(2) as pool:
        with pytest.raises(GenerationError, match=r"row [0-9]+ failed: KeyError: 'scene'"):
            made(sample, tmp_path / "x.h5", 40, executor=pool, columns=_RAGGED)
        (tmp_path / "mended").touch()
        found = made(sample, tmp_path / "x.h5", 40, executor=pool, columns=_RAGGED)
    with h5py.File(found.paths[0]) as file:
        assert file["r_length"][:].tolist() == list(range(40))


def test_an_executor_that_was_shut_down(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        pass
    with pytest.raises(GenerationError, match=r"cannot schedule new futures.* 0 of 700 rows are kept"):
        made(sums(), tmp_path / "x.h5", executor=pool)


def test_a_process_of_an_executor_that_dies(tmp_path: Path) -> None:
    """The standard library's executor is broken then, and does not say which task it was."""

    def sample(index: int, rng: np.random.Generator) -> dict[str, Any]:
        import os

        if index == 500 and not (tmp_path / "mended").exists():
            os._exit(3)
        return {"x": rng.normal(size=3)}

    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        with pytest.raises(GenerationError, match=r"BrokenProcessPool.* rows are kept in"):
            made(sample, tmp_path / "x.h5", executor=pool)
    (tmp_path / "mended").touch()
    found = made(sample, tmp_path / "x.h5", workers=0)
    alone = made(sample, tmp_path / "y.h5", workers=0)
    assert digests(found)[0][1] == digests(alone)[0][1]


def test_a_module_that_workers_have_not_is_named(
    tmp_path: Path, elsewhere: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_here_scenes.py").write_text("def sample(index, rng):\n    return {'x': index}\n")
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        import only_here_scenes  # type: ignore[import-not-found]

        with pytest.raises(GenerationError, match="No module named 'only_here_scenes'") as caught:
            made(only_here_scenes.sample, tmp_path / "x.h5", executor=elsewhere)
        assert "a worker cannot make rows" in str(caught.value) and "0 of 700 rows" in str(caught.value)
        # Own processes look where this one does.
        found = made(only_here_scenes.sample, tmp_path / "x.h5", workers=2)
    sys.modules.pop("only_here_scenes")
    assert found.rows == _N


def test_what_a_closure_holds_open_cannot_go_to_processes(tmp_path: Path, spawned: Executor) -> None:
    lock = threading.Lock()

    def locked(index: int, rng: np.random.Generator) -> dict[str, Any]:
        with lock:
            return {"x": rng.random()}

    for who in ({"workers": 2}, {"executor": spawned}):
        with pytest.raises(OptionError, match="locked cannot be sent to another process") as caught:
            made(locked, tmp_path / "x.h5", **who)
        for words in ("within the function", "workers=0", "executor='threads'"):
            assert words in str(caught.value)
    # What it left is no obstacle, as nothing is in it.
    found = made(locked, tmp_path / "x.h5", workers=2, executor="threads")
    assert digests(found)[0][1] == digests(made(locked, tmp_path / "y.h5", workers=0))[0][1]


def test_an_open_file_of_a_closure_cannot_go_to_processes(tmp_path: Path) -> None:
    (tmp_path / "scene.bin").write_bytes(bytes(100))
    with open(tmp_path / "scene.bin", "r+b") as file:

        def sample(index: int, rng: np.random.Generator) -> dict[str, Any]:
            return {"x": file.fileno() > 0}

        with pytest.raises(OptionError, match=r"cannot be sent to another process.*Open files, locks"):
            made(sample, tmp_path / "x.h5", workers=2)
        made(sample, tmp_path / "x.h5", workers=2, executor="threads")


def test_a_function_that_was_mended_after_it_could_not_be_sent(tmp_path: Path) -> None:
    """Nothing was made, so that nothing is lost with what the other has left."""
    lock = threading.Lock()

    def locked(index: int, rng: np.random.Generator) -> dict[str, Any]:
        with lock:
            return {"x": rng.random()}

    with pytest.raises(OptionError):
        made(locked, tmp_path / "x.h5", workers=2)
    found = made(sums(), tmp_path / "x.h5", workers=2)
    assert found.made == _N and nothing_but(tmp_path, found)


def test_threads_of_others_and_global_generators(tmp_path: Path) -> None:
    def sample(index: int, rng: np.random.Generator) -> dict[str, Any]:
        return {"x": np.random.rand(2000)}

    alone = made(sample, tmp_path / "alone.h5", 300, workers=0, seed_globals=True)
    with ThreadPoolExecutor(4) as pool:
        other = made(sample, tmp_path / "other.h5", 300, executor=pool, seed_globals=True)
    assert digests(alone)[0][1] == digests(other)[0][1]


def _threads_of_libraries() -> list[int]:
    return [one["num_threads"] for one in threadpool_info() if one["user_api"] == "blas"]


def test_blocks_side_by_side_leave_libraries_their_threads() -> None:
    with threadpool_limits(2):
        first, second = OneThreadEach(), OneThreadEach()
        first.__exit__(None, None, None)
        assert set(_threads_of_libraries()) == {1}  # the second is not done
        second.__exit__(None, None, None)
        assert set(_threads_of_libraries()) == {2}


@pytest.mark.parametrize("who", [{"workers": 0}, {"executor": "threads", "workers": 2}, {"workers": 1}])
def test_libraries_have_their_threads_afterwards(tmp_path: Path, who: dict[str, Any]) -> None:
    with threadpool_limits(2):
        made(sums(), tmp_path / "x.h5", 50, **who)
        assert set(_threads_of_libraries()) == {2}


def test_a_buffer_that_a_function_uses_again(tmp_path: Path) -> None:
    """A simulator's state, say: the values are those that it had when the function returned."""
    state, path = np.zeros(4), np.zeros((9, 2))

    def sample(index: int, rng: np.random.Generator) -> dict[str, Any]:
        state[:] = index
        path[:] = -index
        return {"x": state, "r": path[: 1 + index % 5]}

    columns = {"r": ("float64", (None, 2))}
    found = made(sample, tmp_path / "x.h5", 100, workers=0, columns=columns)
    with h5py.File(found.paths[0]) as file:
        assert file["x"][:, 0].tolist() == list(range(100))
        assert file["r"][:, 0, 0].tolist() == [-index for index in range(100)]


def test_a_buffer_that_a_batch_uses_again(tmp_path: Path) -> None:
    buffer = np.zeros((256, 5000))

    def sample(index: int, rng: np.random.Generator) -> dict[str, Any]:
        return {"x": np.full(5000, float(index))}

    def batch(indices: np.ndarray, rng: Any) -> dict[str, Any]:
        buffer[: len(indices)] = indices[:, None]
        return {"x": buffer[: len(indices)]}

    sample.batch = batch  # type: ignore[attr-defined]
    found = made(sample, tmp_path / "x.h5", 400, workers=0)
    with h5py.File(found.paths[0]) as file:
        assert file["x"][:, 0].tolist() == list(range(400))


@pytest.mark.parametrize("who", [{"workers": 0}, {"workers": 2}, {"workers": 2, "executor": "threads"}])
def test_a_function_that_goes_to_another_folder(
    tmp_path: Path, who: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "elsewhere").mkdir()
    elsewhere = str(tmp_path / "elsewhere")

    def sample(index: int, rng: np.random.Generator) -> dict[str, Any]:
        import os

        os.chdir(elsewhere)
        return {"x": index, "text": str(index)}

    monkeypatch.chdir(tmp_path / "work")
    found = made(sample, Path("x.h5"), 50, **who)
    assert found.rows == 50
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["x.h5"]
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize("who", [{"workers": 0}, {"workers": 2}, {"workers": 2, "executor": "threads"}])
def test_a_function_that_exits_is_a_row_that_failed(tmp_path: Path, who: dict[str, Any]) -> None:
    def sample(index: int, rng: np.random.Generator) -> dict[str, Any]:
        if index == 33:
            raise SystemExit("no licence")
        return {"x": index}

    with pytest.raises(GenerationError, match="row 33 failed: SystemExit: no licence"):
        made(sample, tmp_path / "x.h5", 50, **who)


class _Cancelling(Executor):
    """Cancels some tasks, as a cluster does that loses a worker."""

    def __init__(self) -> None:
        self._pool, self._count = ThreadPoolExecutor(1), 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self._count += 1
        if self._count % 3:
            return self._pool.submit(fn, *args, **kwargs)
        future: Future[Any] = Future()
        future.cancel()
        future.set_running_or_notify_cancel()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._pool.shutdown(wait)


def test_tasks_that_a_cluster_cancels_are_given_to_it_again(
    tmp_path: Path, reference: Callable[[str], SimpleNamespace]
) -> None:
    wanted = reference("batches")
    with _Cancelling() as executor:
        found = made(wanted.fn, tmp_path / "x.h5", executor=executor, **wanted.options)
    assert digests(found) == wanted.files


def test_the_executor_sees_no_task_of_more_than_it_was_asked_for(tmp_path: Path) -> None:
    """``workers=`` beside an executor: so many blocks are made at a time."""
    seen: list[int] = []

    class Watched(ThreadPoolExecutor):
        def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            seen.append(self._work_queue.qsize())
            return super().submit(fn, *args, **kwargs)

    with Watched(1) as pool:
        made(sums(), tmp_path / "x.h5", executor=pool, workers=2)
    assert len(seen) > 4 and max(seen) <= 4


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
"""


@pytest.mark.few(1)
@pytest.mark.parametrize(("executor", "workers"), [("0", "0"), ("threads", "2"), ("processes", "2")])
def test_libraries_that_rows_load_have_one_thread_too(tmp_path: Path, executor: str, workers: str) -> None:
    (tmp_path / "script.py").write_text(_LATE)
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "2", "OMP_NUM_THREADS": "2"}

    def run(how: str) -> int:
        command = [sys.executable, "script.py", how, executor, workers]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, check=False
        ).returncode

    # The second run has no first row in which the library could have been loaded before those that are kept.
    assert run("stops") == 1 and run("goes on") == 0
    with h5py.File(tmp_path / "x.h5") as file:
        assert set(file["threads"][:]) == {1} and file["libraries"][:].min() >= 2


def test_workers_have_pythons_options_of_their_parent(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import sys\n"
        "from fastpipe import generate\n"
        "def sample(index, rng):\n"
        "    assert index < 0\n"
        "    return {'optimize': sys.flags.optimize, 'utf8': sys.flags.utf8_mode}\n"
        "generate(sample, 40, 'x.h5', seed=0, workers=2, progress=False)\n"
    )
    subprocess.run([sys.executable, "-O", "-X", "utf8", "script.py"], cwd=tmp_path, check=True)
    with h5py.File(tmp_path / "x.h5") as file:
        assert set(file["optimize"][:]) == {1} and set(file["utf8"][:]) == {1}


def test_a_library_that_was_loaded_by_rows_has_its_threads_afterwards(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        _LATE
        + """
assert "scipy.linalg" in sys.modules
print({one["num_threads"] for one in threadpoolctl.threadpool_info() if one["user_api"] == "blas"})
"""
    )
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "2", "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "script.py", "goes on", "0", "0"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "{2}\n"


def test_workers_have_the_arguments_of_the_script(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import sys\n"
        "from fastpipe import generate\n"
        "def sample(index, rng):\n"
        "    return {'argument': sys.argv[1]}\n"
        "generate(sample, 40, 'x.h5', seed=0, workers=2, progress=False)\n"
    )
    subprocess.run([sys.executable, "script.py", "{it's}"], cwd=tmp_path, check=True)
    with h5py.File(tmp_path / "x.h5") as file:
        assert set(file["argument"].asstr()[:]) == {"{it's}"}


class _Damaging(ThreadPoolExecutor):
    """Sends one block otherwise than it was made, as a network may."""

    def __init__(self) -> None:
        super().__init__(1)
        self._count = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self._count += 1
        is_damaged = self._count == 3

        def run() -> Any:
            done = fn(*args, **kwargs)
            content, crc = done.sent
            return replace(done, sent=(content[:-9] + bytes(9), crc)) if is_damaged else done

        return super().submit(run)


def test_a_block_that_arrives_otherwise_is_not_kept(tmp_path: Path) -> None:
    def sample(index: int, rng: np.random.Generator) -> dict[str, Any]:
        return {"x": rng.normal(size=3), "r": np.arange(1 + index % 7)}

    with _Damaging() as executor:
        with pytest.raises(GenerationError, match=r"rows \d+ to \d+ did not arrive as .* checksums differ"):
            made(sample, tmp_path / "x.h5", executor=executor, columns=_RAGGED)
        found = made(sample, tmp_path / "x.h5", executor=executor, columns=_RAGGED)
    alone = made(sample, tmp_path / "alone.h5", workers=0, columns=_RAGGED)
    assert digests(found)[0][1] == digests(alone)[0][1]
