"""Fixtures for all tests.  Two of them watch every test: ``no_leaks`` and ``hang_guard``."""

from __future__ import annotations

import faulthandler
import functools
import gc
import importlib
import multiprocessing
import multiprocessing.util
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from multiprocessing.forkserver import ForkServer
from pathlib import Path
from typing import Any

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key
from hypothesis import HealthCheck, settings
from s3_server import S3, S3Missing, S3Server

from fastpipe import console
from fastpipe.bench.synthetic import photo_tree as make_photo_tree
from fastpipe.core.file_identity import identify

pytest_plugins = ["pytester"]

_ROOT = Path(__file__).resolve().parents[1]
# Threads and processes may end shortly after the test that used them.  Longer, in a run beside another: names
# in shared memory of processes that a test there has killed are not mapped by any that is known to be its.
_PATIENCE_S = 5.0 if "PYTEST_XDIST_WORKER" not in os.environ else 30.0
_HANG_S = 180

settings.register_profile(
    "default", deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None
)
settings.register_profile("nightly", settings.get_profile("default"), max_examples=1000, derandomize=False)
settings.load_profile(os.environ.get("FASTPIPE_HYPOTHESIS", "default"))


console.SILENT_S = 3600.0  # a slow machine must not add lines to what commands print


def pytest_configure(config: pytest.Config) -> None:
    """Give this run a temporary folder of its own, in which nobody else leaves files."""
    # What a shell starts in the background ignores Ctrl-C, and so would the scripts that tests start.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(config, "workerinput"):
        os.setpgid(0, 0)  # by which ``no_leaks`` tells this run's segments from those of the one beside it
    multiprocessing.util.get_temp_dir()  # which lives longer than this folder may
    # All tests have one fork server, from the first that asks for it on: else each of its workers imports torch.
    multiprocessing.set_forkserver_preload(["fastpipe.torch"])
    # Short, as it is one in another where tests run side by side: names of sockets have 107 characters at most.
    folder = tempfile.mkdtemp(prefix="fp-")
    cache = os.path.join(folder, "cache")  # not the user's own
    os.mkdir(cache)
    start = ForkServer.ensure_running

    def start_with_common_folder(self: Any) -> None:
        """Whichever test is the first to ask for it, and has a cache folder of its own."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", cache)
            start(self)

    patch = pytest.MonkeyPatch()
    patch.setenv("TMPDIR", folder)
    patch.setenv("XDG_CACHE_HOME", cache)
    patch.setattr(tempfile, "tempdir", folder)
    patch.setattr(ForkServer, "ensure_running", start_with_common_folder)
    patch.setattr(subprocess.Popen, "__exit__", _kill_and_leave)
    config.add_cleanup(patch.undo)
    config.add_cleanup(functools.partial(shutil.rmtree, folder, ignore_errors=True))


_leave = subprocess.Popen.__exit__


def _kill_and_leave(process: subprocess.Popen[Any], kind: type[BaseException] | None, *error: Any) -> None:
    """End a test's process when the test fails: waiting for one that runs for ever would hide why it failed."""
    if kind is not None and process.poll() is None:
        process.kill()
    _leave(process, kind, *error)


_unfreeze = gc.unfreeze
_thawed = threading.Event()  # by what was tested: a benchmark freezes and thaws for itself


def _unfreeze_and_note() -> None:
    _thawed.set()
    _unfreeze()


def _freeze() -> None:
    """Leave what the imports made out of every later collection of garbage: it takes half a second."""
    gc.collect()
    gc.freeze()
    _thawed.clear()


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Run the tests of a file in one process, and all files that use the S3 server in the same: each process
    that needs the server starts one."""
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "s3" if _uses_server(file) else file

    return ByFile(config, log)


@functools.cache
def _uses_server(file: str) -> bool:
    return re.search(r"def \w+\([^)]*\bs3: ", (_ROOT / file).read_text(encoding="utf-8")) is not None


@pytest.hookimpl(tryfirst=True)  # before those that are slow are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark cases as slow that are more than the few of them that ``few`` asks for."""
    families: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("few") and not item.get_closest_marker("slow"):
            families.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, cases in families.items():
        (count,) = cases[0].get_closest_marker("few").args  # type: ignore[union-attr]
        # Evenly spaced ones of two parameters might all have one value of one of them.
        chosen = random.Random(name).sample(cases, min(count, len(cases)))
        for case in cases:
            if case not in chosen:
                case.add_marker(pytest.mark.slow)


_files: set[Path] = set()


@pytest.hookimpl(tryfirst=True)  # before the file's fixtures are made
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Freeze what earlier files of tests have imported and kept; skip what needs a GPU where there is none."""
    if item.path not in _files:
        _files.add(item.path)
        _freeze()
    if item.get_closest_marker("gpu") is None:
        return
    torch = pytest.importorskip("torch", reason="pip install '.[torch]'")
    if not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device: run `pytest -m gpu` on a machine that has one")


def pytest_collection_finish() -> None:
    """Freeze, and see to it that ``no_leaks`` learns of a thaw."""
    gc.unfreeze = _unfreeze_and_note
    _freeze()


def pytest_sessionfinish() -> None:
    """Let libraries see at the end that what they made is freed."""
    gc.unfreeze = _unfreeze
    gc.unfreeze()


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a thread, process, descriptor, shared segment or temporary file."""
    if _thawed.is_set():
        _freeze()
    before = {kind: look() for kind, look in _LOOKS.items()}
    yield
    if request.node.get_closest_marker("leaks"):
        return
    deadline = time.monotonic() + _PATIENCE_S
    while _new_since(before):
        gc.collect()  # which waits for a DataLoader's workers, if that is what is collected
        if (left := _new_since(before)) and time.monotonic() > deadline:
            pytest.fail("left behind by this test:\n" + "\n".join(f"  {kind}: {what}" for kind, what in left))
        threading.Event().wait(0.02)


@pytest.fixture
def documents_code(photo_tree: Path, tmp_path: Path, monkeypatch: Any) -> Callable[[str], dict[str, Any]]:
    """Runs code of the documents in a folder that has the files of which they speak; returns its names."""
    monkeypatch.chdir(tmp_path)  # for what it writes, too
    _make_files_of_documents()

    def run(code: str) -> dict[str, Any]:
        code = code.replace('"train"', repr(str(photo_tree)))
        # The same files, as if they were in a bucket.
        code = code.replace("s3://bucket/train", f"file://{photo_tree}").replace("/nvme/", f"{tmp_path}/")
        scope: dict[str, Any] = {}
        exec(compile(code, "documents", "exec"), scope)
        return scope

    return run


def _make_files_of_documents() -> None:
    """The files of the documents, in the folder that is the current one."""
    import h5py
    import nibabel
    import numpy as np
    import tensorstore  # here: few tests need them
    from PIL import Image
    from volume_files import write_dicom

    Path("photos").mkdir(exist_ok=True)
    Image.new("RGB", (64, 48), "teal").save("photos/1.jpg")
    Path("photos.csv").write_text("file,label,age\n" + "1.jpg,0,7\n" * 9)
    Path("a.cls").write_text("7")
    with tarfile.open("train-000.tar", "w") as shard:
        shard.add("photos/1.jpg", "a.jpg")
        shard.add("a.cls")
    with h5py.File("speech.h5", "w") as file:
        file.create_dataset("mels", data=np.ones((40, 8, 4)), chunks=(4, 8, 4), compression="gzip")
        file["words"] = np.arange(40)
        file["segments"], file["speakers"] = np.ones((20, 3, 8, 4), "f4"), np.ones((20, 3), int)
    with h5py.File("scans.h5", "w") as file:
        for number in range(20):
            file[f"{number:04}/image"] = np.ones((8, 8), "f4")
            file[f"{number:04}"].attrs["label"] = number
    Path("knee").mkdir(exist_ok=True)
    for number in range(3):
        with h5py.File(f"knee/{number}.h5", "w") as file:
            file["kspace"] = np.ones((number + 1, 2, 8, 6 + number), "c8")
            file["reconstruction_rss"], file.attrs["max"] = np.ones((number + 1, 4, 4), "f4"), 1.0
    image = np.random.default_rng(0).integers(0, 1000, (66, 70, 80)).astype(np.uint16)
    for name, array in (("image", image), ("labels", (image > 900).astype(np.uint8))):
        spec = {
            "driver": "zarr3", "kvstore": {"driver": "file", "path": f"{Path.cwd()}/scan.zarr/{name}/"},
            "metadata": {"shape": array.shape, "data_type": array.dtype.name},
        }  # fmt: skip
        tensorstore.open(spec, create=True).result().write(array).result()
        folder = Path("cases/1")
        folder.mkdir(parents=True, exist_ok=True)
        small = nibabel.Nifti1Image(array[:40].astype(np.int16), np.eye(4))
        nibabel.save(small, folder / f"{name}.nii.gz")
    write_dicom(Path("ct/case001"), image[:40].astype(np.int16), scale=(1, -1024))


@pytest.fixture(scope="session")
def example() -> Callable[[str], AbstractContextManager[dict[str, Any]]]:
    """The scripts of an example by their names, as modules that other tests do not see."""

    @contextmanager
    def scripts(name: str) -> Iterator[dict[str, Any]]:
        folder = _ROOT / "examples" / name
        names = sorted(path.stem for path in folder.glob("*.py"))
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(str(folder))
            yield {name: importlib.import_module(name) for name in names}
            for name in names:
                sys.modules.pop(name, None)

    return scripts


@pytest.fixture(autouse=True)
def hang_guard(request: pytest.FixtureRequest) -> Iterator[None]:
    """End the run, with the stacks of all threads, when a test takes far too long."""
    marker = request.node.get_closest_marker("hang_after")
    default = 20 * _HANG_S if request.node.get_closest_marker("slow") else _HANG_S
    limit = marker.args[0] if marker else default
    # Descriptor 2 is captured while a test runs; pytest keeps the terminal's for this use.
    terminal = request.config.stash[fault_handler_stderr_fd_key]
    faulthandler.dump_traceback_later(limit, exit=True, file=terminal)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def no_gc() -> Iterator[None]:
    """What a test frees must go without the help of the garbage collector."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def grown_in_epochs(no_gc: None) -> Callable[[Any], dict[str, int]]:
    """Kinds of objects of which every epoch of a loader leaves one or more, also of one that fails."""

    def objects() -> Counter[str]:
        return Counter(type(one).__name__ for one in gc.get_objects())

    def run(loader: Any, epochs: int) -> None:
        for _ in range(epochs):
            iterator = iter(loader)
            while True:
                try:
                    next(iterator)
                except OSError:
                    continue
                except StopIteration:
                    break

    def grown(loader: Any) -> dict[str, int]:
        run(loader, 3)
        before = objects(), objects()  # the first call itself leaves something in caches
        run(loader, 20)
        return {kind: count for kind, count in (objects() - before[1]).items() if count >= 20}

    return grown


@pytest.fixture
def same_generators() -> Iterator[None]:
    """torch's global generator begins at a seed, and none of the global ones is changed for other tests."""
    import numpy as np
    import torch  # here: not every test needs it

    state = torch.get_rng_state(), random.getstate(), np.random.get_state()
    torch.manual_seed(0)
    yield
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    np.random.set_state(state[2])


@pytest.fixture
def forked() -> Callable[[Callable[[], object]], int]:
    """Runs a function in a forked process and returns that one's number, for the test to wait for.  Its
    exit code is 0, or 1 after an error."""

    def run(work: Callable[[], object]) -> int:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                work()
                code = 0
            except BaseException:  # pytest's part of the process is the parent's: no error may get there
                traceback.print_exc(file=sys.__stderr__)
            finally:
                os._exit(code)
        return pid

    return run


@pytest.fixture
def in_child(forked: Callable[[Callable[[], object]], int]) -> Callable[[Callable[[], object]], None]:
    """Runs a function in a forked process, and fails where it fails."""

    def run(work: Callable[[], object]) -> None:
        assert os.waitstatus_to_exitcode(os.waitpid(forked(work), 0)[1]) == 0

    return run


Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs ``fastpipe``; its exit code, output and errors."""
    from fastpipe.cli import main  # here: few tests need it

    def run(*arguments: Any) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([*map(str, arguments)])
        captured = capsys.readouterr()
        print(*captured)  # shown where a test fails
        return code, *captured

    return run


@pytest.fixture
def repack(command: Command) -> Command:
    return functools.partial(command, "repack")


@pytest.fixture
def inspect(command: Command) -> Command:
    return functools.partial(command, "inspect")


@pytest.fixture(scope="session")
def settled() -> Callable[[Path], Path]:
    """Waits until the file system's clock has gone on since a file, or those in a folder, changed: only then
    are they kept.  Returns what it is given."""

    def wait(path: Path) -> Path:
        for file in path.rglob("*") if path.is_dir() else (path,):
            while file.is_file() and not identify(str(file), b"").is_settled:
                pass
        return path

    return wait


@pytest.fixture(scope="session")
def properties_of() -> Callable[[str], Any]:
    """HDF5 creation properties that h5py has no function to set; the C library put them into hdf5_properties.h5.

    ``"edges RANK SIZE"``, for 1 to 3 dimensions and elements of 1, 2, 4 or 8 bytes: chunks of (4,), (3, 2) or
    (2, 3, 2), and ``H5Pset_chunk_opts(properties, H5D_CHUNK_DONT_FILTER_PARTIAL_CHUNKS)``.
    ``"undefined fill"``, for elements of int32: ``H5Pset_fill_value(properties, type, NULL)``.
    """
    h5py = importlib.import_module("h5py")

    def properties(name: str) -> Any:
        with h5py.File(Path(__file__).with_name("hdf5_properties.h5")) as file:
            return file[name].id.get_create_plist()

    return properties


@pytest.fixture
def odd_hdf5(tmp_path: Path, properties_of: Callable[[str], Any]) -> Path:
    """An HDF5 file with datasets int32 (10, 5), stored in ways of which h5py shows little."""
    h5py, np = importlib.import_module("h5py"), importlib.import_module("numpy")
    h5d, h5p, h5s = h5py.h5d, h5py.h5p, h5py.h5s
    rows = np.random.default_rng(0).integers(0, 1 << 30, (10, 5)).astype(np.int32)
    with h5py.File(tmp_path / "odd.h5", "w", libver="latest", userblock_size=1024) as file:

        def dataset(name: str, made: Any, shape: Any = (10, 5), most: Any = (h5s.UNLIMITED,) * 2) -> Any:
            space = h5s.create_simple(shape, most)
            return h5py.Dataset(h5d.create(file.id, name.encode(), h5py.h5t.STD_I32LE, space, made))

        def edges(*filters: str, made: Any = None) -> Any:
            made = made or properties_of("edges 2 4")
            for name in filters:
                {"shuffle": made.set_shuffle, "gzip": lambda: made.set_deflate(4),
                 "lzf": lambda: made.set_filter(h5py.h5z.FILTER_LZF, h5py.h5z.FLAG_OPTIONAL),
                 "fletcher32": made.set_fletcher32}[name]()  # fmt: skip
            return made

        def chunks(*filters: str) -> Any:
            made = h5p.create(h5p.DATASET_CREATE)
            made.set_chunk((3, 2))
            return edges(*filters, made=made)

        for filters in (["shuffle"], ["gzip"], ["shuffle", "lzf", "fletcher32"]):
            dataset(f"edges {' '.join(filters)}", edges(*filters))[...] = rows
        grown = dataset("edges that were edges no more", edges("shuffle", "gzip"), (5, 3))
        grown[...] = rows[:5, :3]
        grown.resize((10, 5))
        grown[5:] = rows[5:]
        shrunk = dataset("edges that were none", edges("shuffle", "gzip"), (12, 6))
        shrunk[:10, :5] = rows
        shrunk.resize((10, 5))
        skipped = dataset("left out of a chunk", chunks("shuffle", "gzip"))
        skipped[...] = rows
        skipped.id.write_direct_chunk((3, 2), rows[3:6, 2:4].tobytes(), 0b11)
        never = chunks("gzip")
        never.set_fill_value(np.array(7, np.int32))
        never.set_fill_time(h5d.FILL_TIME_NEVER)
        dataset("never filled", never)[4:] = rows[4:]
        undefined = properties_of("undefined fill")
        undefined.set_chunk((3, 2))
        dataset("undefined fill", undefined)[4:] = rows[4:]
        dataset("grows across", chunks("shuffle"), most=(10, h5s.UNLIMITED))[...] = rows
    return tmp_path / "odd.h5"


class _S3(S3):
    def stop_gateway(self, *, kill: bool = False) -> None:
        self._own().stop_gateway(kill=kill)

    def start_gateway(self) -> None:
        self._own().start_gateway()

    def _own(self) -> S3Server:
        if self.server is None:
            pytest.skip(f"the server at {self.endpoint} cannot be stopped: unset $FASTPIPE_S3_ENDPOINT")
        return self.server


@pytest.fixture(scope="session")
def s3() -> Iterator[Any]:
    """A real S3 server, see ``s3_server.S3``."""
    try:
        with _S3() as server:
            _SERVERS.append(server)  # of all tests: none of them leaves it behind
            yield server
            _SERVERS.remove(server)
    except S3Missing as missing:
        if os.environ.get("FASTPIPE_REQUIRE_S3"):
            raise
        pytest.skip(str(missing))


@pytest.fixture(scope="session")
def photo_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small folder of photograph-like JPEGs in class folders, made once."""
    return make_photo_tree(tmp_path_factory.mktemp("photo_tree"), classes=4, per_class=6)


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six small photographs in two classes."""
    return make_photo_tree(tmp_path_factory.mktemp("tree"), classes=2, per_class=3, sizes=(60, 90))


@pytest.fixture(scope="session")
def photos(photo_tree: Path) -> Path:
    """Real photographs where there are any (``$FASTPIPE_PHOTOS``, or ``shared/data/photos``
    beside the checkout), else ``photo_tree``."""
    named = os.environ.get("FASTPIPE_PHOTOS")
    places = *([Path(named)] if named else []), _ROOT.parent / "shared" / "data" / "photos", photo_tree
    return next(filter(Path.is_dir, places))


def _new_since(before: dict[str, set[str]]) -> list[tuple[str, str]]:
    new = {kind: look() - before[kind] for kind, look in _LOOKS.items()}
    new["shared memory"] -= _of_other_programs(new["shared memory"])
    return [(kind, what) for kind, found in new.items() for what in sorted(found)]


def _threads() -> set[str]:
    threads = threading.enumerate()
    return {f"{one.name} ({one.ident})" for one in threads if not one.name.startswith(_KEPT_THREADS)}


# A thread of a C library that called into Python once is listed as Dummy for ever; zarr-python keeps those that
# the first test to use it starts, whichever that is in this run's share of the files: its event loop's, that
# loop's executor's and its pool's; fsspec its event loop's, and the S3 server the one that starts its programs.
# The process has one engine, and one thread that waits for what it reports: ``_batches`` looks at its jobs.
_KEPT_THREADS = ("Dummy-", "zarr_io", "asyncio_", "zarr_pool_", "fsspecIO", "fastpipe-s3", "fastpipe-watcher")


def _batches() -> set[str]:
    """Batches that the native engine has."""
    jobs = sys.modules.get("fastpipe.core.pool")
    return set() if jobs is None else {str(number) for number in list(jobs._jobs)}


def _children() -> set[str]:
    multiprocessing.active_children()  # reaps those that have ended
    found = set()
    for task in Path("/proc/self/task").glob("*/children") if os.path.isdir("/proc/self/task") else ():
        try:
            found |= set(task.read_text().split())
        except OSError:  # the thread has ended meanwhile
            continue
    served = {str(pid) for server in _SERVERS for pid in server.pids}
    return {pid for pid in found - served if not _is_helper(pid)}


_SERVERS: list[Any] = []


def _is_helper(pid: str) -> bool:
    """Servers of ``multiprocessing``, which it starts once and ends with the interpreter."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return True
    return "resource_tracker" in command or "forkserver" in command


def _descriptors() -> set[str]:
    found = set()
    for number in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue
        if not target.startswith(_KEPT_DESCRIPTORS):
            found.add(f"{number} → {target}")
    return found


# Opened once by whoever first needs them, and kept: the pipes of multiprocessing's helpers and
# of torch's resource sharer, Python's source of random bytes, the files of loaded libraries, a GPU's driver.
_KEPT_DESCRIPTORS = (
    "pipe:", "socket:", "/dev/urandom", "/dev/null", "anon_inode:", "/proc", "/sys", "/dev/pts", "/dev/nvidia",
)  # fmt: skip


def _segments() -> set[str]:
    return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()


def _of_other_programs(segments: set[str]) -> set[str]:
    """Which segments are not this run's: the folder is the whole machine's."""
    if segments - _FOREIGN_SEGMENTS:
        others = _mapped_by_others()
        found = {entry.name: str(entry.inode()) for entry in os.scandir("/dev/shm")}
        _FOREIGN_SEGMENTS.update(name for name in segments if found.get(name) in others)
    return _FOREIGN_SEGMENTS


# Names are random, so what was once seen in the hands of another program (another test run, say) stays foreign.
_FOREIGN_SEGMENTS: set[str] = set()


def _mapped_by_others() -> set[str]:
    """Inodes of segments in processes outside this run's process group, where its children stay.

    Not their names: the C library maps a semaphore under another name than it then gets.
    """
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.getpgid(int(process.name)) != os.getpgrp():
                maps = (process / "maps").read_bytes().splitlines()  # names need not be UTF-8
                found |= {line.split(maxsplit=5)[4].decode() for line in maps if b"/dev/shm/" in line}
        except OSError:  # it has ended meanwhile, or is another user's
            continue
    return found


def _temporary_files() -> set[str]:
    # pytest's own folder, those that multiprocessing, torch and TensorFlow keep until the process ends, and servers'.
    servers = (os.path.basename(server.folder) for server in _SERVERS)
    kept = ("pytest-of-", "pymp-", "torch", "__autograph", *servers)
    return {name for name in os.listdir(tempfile.gettempdir()) if not name.startswith(kept)}


_LOOKS: dict[str, Callable[[], set[str]]] = {
    "thread": _threads, "batch": _batches, "child process": _children, "descriptor": _descriptors,
    "shared memory": _segments, "temporary file": _temporary_files,
}  # fmt: skip
