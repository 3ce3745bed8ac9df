"""Read the stacks of threads, and find out which stage of the input pipeline and which line they run."""

from __future__ import annotations

import ast
import contextlib
import functools
import gc
import itertools
import linecache
import operator
import os
import site
import sys
import sysconfig
import threading
import time
from collections import ChainMap
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")

_IMPORTING = "<frozen importlib"
_OWN = str(Path(__file__).resolve().parents[1])
_CALL: Any = operator.methodcaller("__call__")

READ, DECODE, TRANSFORM, COLLATE, TRANSFER = "read", "decode", "transform", "collate", "transfer"
OTHER = "other"  # the script's own code without calls of known packages
GRAPH = "graph"  # TensorFlow's own operations
STAGES = (READ, DECODE, TRANSFORM, COLLATE, TRANSFER, GRAPH, OTHER)

_IMAGE_READERS = frozenset({
    "open", "load", "convert", "draft", "verify", "seek", "frombytes", "frombuffer", "load_prepare",
    "_getdecoder", "preinit", "init", "getmodebase",
})  # fmt: skip

# The longest prefix that matches a dotted name decides the stage.
_PREFIXES: dict[str, str] = {
    **dict.fromkeys((
        "_io", "io.open", "builtins.open", "os", "posix", "mmap", "socket", "ssl", "select", "selectors",
        "http", "urllib", "urllib3", "requests", "aiohttp", "botocore", "boto3", "s3fs", "s3torchconnector",
        "fsspec", "gcsfs", "adlfs", "obstore", "h5py", "netCDF4", "tensorstore", "zarr.storage", "lmdb",
        "pyarrow", "pathlib.Path", "numpy.lib.format", "numpy.lib._format_impl", "numpy.lib.npyio",
        "numpy.lib._npyio_impl", "numpy.load", "numpy.fromfile", "numpy.memmap", "nibabel", "asyncio",
        "webdataset", "shutil", "torch.load", "torch.serialization",
    ), READ),
    **dict.fromkeys((
        "PIL", "simplejpeg", "turbojpeg", "nvidia", "torchvision.io", "torchcodec", "imageio", "imagecodecs",
        "cv2.imread", "cv2.imdecode", "skimage.io", "soundfile", "audioread", "librosa.load",
        "librosa.core.audio", "torchaudio.load", "torchaudio._backend", "scipy.io", "av", "decord", "zlib",
        "gzip", "bz2", "lzma", "zipfile", "tarfile",
        "blosc", "blosc2", "numcodecs", "zarr", "zstandard", "zstd", "lz4", "pickle", "_pickle", "json",
        "tifffile", "pandas", "csv", "_csv", "pydicom", "SimpleITK", "base64", "binascii",
    ), DECODE),
    **dict.fromkeys((
        "torchvision.transforms", "torchvision.tv_tensors", "torchvision.ops", "albumentations", "kornia",
        "monai", "torchio", "batchgenerators", "batchgeneratorsv2", "imgaug", "scipy", "skimage", "cv2",
        "numpy", "torch", "torchaudio", "librosa", "numba", "PIL.ImageOps", "PIL.ImageEnhance",
        "PIL.ImageFilter", "PIL.ImageDraw", "PIL.ImageChops", "random", "math", "statistics", "transformers",
        "tokenizers",
    ), TRANSFORM),
    **dict.fromkeys(("torch.utils.data._utils.collate", "torch.utils.data._utils.fetch"), COLLATE),
    **dict.fromkeys((
        "multiprocessing", "torch.multiprocessing", "torch.utils.data._utils.pin_memory",
        "torch.utils.data._utils.worker",
    ), TRANSFER),
}  # fmt: skip


@functools.lru_cache(4096)
def stage_of(name: str) -> str | None:
    if name.startswith("PIL.Image."):  # this module opens, decodes and resamples images
        return DECODE if name.rpartition(".")[2] in _IMAGE_READERS else TRANSFORM
    while name:
        found = _PREFIXES.get(name)
        if found is not None:
            return found
        name = name.rpartition(".")[0]
    return None


class Line(NamedTuple):
    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line} {self.function}" if self.file else "–"

    @property
    def in_parentheses(self) -> str:
        return f" ({self})" if self.file else ""


class Boundary(NamedTuple):
    kind: str
    stage: str | None = None


class Stacks:
    def __init__(self, boundaries: dict[CodeType, Boundary]) -> None:
        self._boundaries = boundaries
        self._called: dict[tuple[CodeType, int], str] = {}  # the name that each instruction calls
        self._are_users: dict[str, bool] = {}
        paths = sysconfig.get_paths()
        places = [paths["stdlib"], paths["platstdlib"], paths["purelib"], paths["platlib"], _OWN]
        places += [*site.getsitepackages(), site.getusersitepackages(), os.path.dirname(sys.executable)]
        self._libraries = tuple(f"{os.path.realpath(place)}{os.sep}" for place in places)

    def look(self, stack: Sequence[FrameType]) -> tuple[str, str, Line]:
        stage = stage_of(self._name_called(stack[0])) if stack else None
        line = Line("", 0, "")
        for frame in stack:
            code = frame.f_code
            boundary = self._boundaries.get(code)
            if boundary is not None:
                return boundary.kind, boundary.stage or stage or OTHER, line
            if self.is_users(code.co_filename):
                if not line.file:
                    line = Line(code.co_filename, frame.f_lineno, _name(code))
            elif stage is None:
                name = getattr(code, "co_qualname", code.co_name)
                stage = stage_of(f"{frame.f_globals.get('__name__', '')}.{name}")
        return "", stage or OTHER, line

    def functions(self, stack: Sequence[FrameType]) -> list[tuple[str, str]]:
        found: dict[tuple[str, str], None] = {}
        for frame in stack:
            code = frame.f_code
            if code.co_filename.startswith(_IMPORTING):
                break
            if self.is_users(code.co_filename):
                found.setdefault((code.co_filename, _name(code)))
        return list(found)

    def is_users(self, file: str) -> bool:
        found = self._are_users.get(file)
        if found is None:
            path = os.path.realpath(file)
            if os.path.isfile(path):
                found = not path.startswith(self._libraries)
            else:  # code without a file, such as "<string>", has no source to show
                is_cell = file in linecache.cache and not file.startswith("<")  # a cell of IPython
                found = is_cell or file.startswith(("<stdin", "<ipython-input"))
            self._are_users[file] = found
        return found

    def _name_called(self, frame: FrameType) -> str:
        key = frame.f_code, frame.f_lasti
        if key not in self._called:
            self._called[key] = ""
            with contextlib.suppress(Exception):  # an object of the script may raise any error
                self._called[key] = name_called(_source(frame), frame)
        return self._called[key]


def _name(code: CodeType) -> str:
    name = str(getattr(code, "co_qualname", code.co_name)).replace(".<locals>", "")
    for inner in (".<genexpr>", ".<listcomp>", ".<dictcomp>", ".<setcomp>"):
        name = name.removesuffix(inner)
    return name


def name_called(source: str, frame: FrameType) -> str:
    """Return the dotted name of the function that an expression calls.

    For a method, return the name of the object's type.  No code of the script is run.
    """
    try:
        node: ast.AST = ast.parse(f"({source.strip()})", mode="eval").body
    except (SyntaxError, ValueError):
        return ""
    names: list[str] = []
    while not isinstance(node, ast.Name):
        if isinstance(node, ast.Attribute):
            names.insert(0, node.attr)
            node = node.value
        elif isinstance(node, (ast.Call, ast.Await, ast.Subscript)):
            node, names = node.func if isinstance(node, ast.Call) else node.value, [] if names else names
        else:
            return ""
    known = ChainMap(frame.f_locals, frame.f_globals, frame.f_builtins)
    if node.id not in known:
        return ""
    found: Any = known[node.id]
    for at, name in enumerate(names):
        try:  # ``__dict__`` has no properties or computed attributes
            inner = object.__getattribute__(found, "__dict__")[name]
        except (AttributeError, TypeError, KeyError):
            break
        if isinstance(found, ModuleType) and isinstance(inner, (type, FunctionType, BuiltinFunctionType)):
            return ".".join([found.__name__, *names[at:]])
        found = inner
    return _type_name(found)


def _source(frame: FrameType) -> str:
    code, line = frame.f_code, frame.f_lineno
    if sys.version_info < (3, 11):
        return linecache.getline(code.co_filename, line)
    first, last, begin, end = next(islice(code.co_positions(), frame.f_lasti // 2, None), (None,) * 4)
    if first is None or last is None or begin is None or end is None or last - first > 20:
        return ""
    lines = [linecache.getline(code.co_filename, at).encode() for at in range(first, last + 1)]
    lines[-1] = lines[-1][:end]  # first, because ``lines[0]`` may be the same line
    lines[0] = lines[0][begin:]
    return b"".join(lines).decode(errors="replace")


def _type_name(found: Any) -> str:
    if isinstance(found, ModuleType):
        return found.__name__
    if isinstance(found, MethodType):  # a bound method has the attributes of its function
        return _type_name(found.__func__)
    named = found
    if isinstance(found, BuiltinFunctionType) and not isinstance(found.__self__, ModuleType | None):
        named = type(found.__self__)  # a method in C: use the type of the object
    elif not isinstance(found, (type, FunctionType, BuiltinFunctionType)):
        named = type(found)
    return f"{named.__module__ or 'builtins'}.{named.__qualname__}"


# Before Python 3.12, any allocation of an object may start garbage collection.  Python 3.11 allocates a frame
# object for each thread, while it holds the lock of the list of threads, and for each caller of a requested
# frame.  A finalizer, or the callback of a weak reference, may then switch to another thread.  If the other
# thread starts or ends a thread, or also requests frames, both threads deadlock.
_COLLECTS_ANYWHERE = sys.version_info < (3, 12)
_one_at_a_time = threading.Lock()
if _COLLECTS_ANYWHERE and hasattr(os, "register_at_fork"):
    os.register_at_fork(  # a child must not start with garbage collection disabled
        before=_one_at_a_time.acquire,
        after_in_parent=_one_at_a_time.release,
        after_in_child=_one_at_a_time.release,
    )


def current_stacks(threads: Iterable[int] | None = None) -> dict[int, list[FrameType]]:
    """Return the stack frames of each thread, by the thread's ident.  The innermost frame comes first.

    ``threads`` contains idents of threads.  If it is None, all threads except the calling thread are used.
    """

    def stacks() -> dict[int, list[FrameType]]:
        frames = sys._current_frames()
        wanted = frames.keys() - {threading.get_ident()} if threads is None else threads
        try:
            return {ident: stack_of(frames[ident]) for ident in wanted if ident in frames}
        finally:
            frames.clear()  # it contains this frame, and the reference cycle would keep all frames alive

    return _without_collecting(stacks)


def stack_of(frame: FrameType | None) -> list[FrameType]:
    """Return a frame and its callers.

    Code outside of this module must pass a frame of its own thread.  In Python 3.11, another thread could run
    on meanwhile.
    """
    found = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found


def native_ids() -> dict[int, int]:
    """Return the kernel's ID of each thread, by the thread's ident.

    The ID is computed from the thread's clock, as by the kernel's ``CPUCLOCK_PID``.
    """
    if sys.platform != "linux":
        return dict.fromkeys(_without_collecting(sys._current_frames), -1)
    return {ident: ~(clock >> 3) for ident, clock in _without_collecting(_clocks).items()}


def _clocks() -> dict[int, int]:
    """Return the clock of each thread.

    For a thread that has ended, freed memory would be read.  Here only C functions run, within one call.  No
    thread can therefore end between the list of threads and the requests for their clocks.
    """
    idents, same = itertools.tee(itertools.chain.from_iterable(map(_CALL, (sys._current_frames,))))
    return dict(zip(idents, map(time.pthread_getcpuclockid, same), strict=True))


def _without_collecting(ask: Callable[[], T]) -> T:
    if not _COLLECTS_ANYWHERE:
        return ask()
    with _one_at_a_time:  # otherwise two threads could restore the wrong state of garbage collection
        collects = gc.isenabled()
        gc.disable()
        try:
            return ask()
        finally:
            if collects:
                gc.enable()
