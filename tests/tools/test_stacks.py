"""Stacks of threads: how they are taken, and which stage and line of the script they belong to."""

from __future__ import annotations

import functools
import gc
import linecache
import sys
import threading
import types
import weakref
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from pytest import MonkeyPatch
from scripts import ran

from fastpipe.tools import recorder
from fastpipe.tools.recorder import Recorder
from fastpipe.tools.stacks import (
    Boundary,
    Stacks,
    current_stacks,
    name_called,
    native_ids,
    stack_of,
    stage_of,
)

STAGES: dict[str | None, list[str]] = {
    "read": [
        "_io.BufferedReader", "builtins.open", "h5py._hl.files.File.__init__", "tensorstore.TensorStore",
        "s3fs.core.S3FileSystem._cat_file", "torch.load",
    ],
    "decode": [
        "PIL.Image.open", "PIL.Image.Image.convert", "cv2.imread", "PIL.JpegImagePlugin.JpegImageFile.draft",
        "zlib.decompress", "torchvision.io.image.decode_jpeg",
    ],
    "transform": [
        "PIL.Image.Image.resize", "PIL.Image.Image.crop", "cv2.resize", "numpy.stack",
        "torch.nn.functional.pad", "torchvision.transforms.v2._geometry.Resize.forward",
        "torchaudio.transforms._transforms.MelSpectrogram.forward",
    ],
    "collate": ["torch.utils.data._utils.collate.default_collate"],
    "transfer": ["multiprocessing.queues.Queue.put"],
    None: ["my.scripts.Thing", ""],
}  # fmt: skip


@pytest.mark.parametrize("stage", STAGES)
def test_a_function_belongs_to_the_stage_of_its_package(stage: str | None) -> None:
    assert {name: stage_of(name) for name in STAGES[stage]} == dict.fromkeys(STAGES[stage], stage)


class Holder:  # has attributes, a property and a ``__getattr__`` that must not run
    def __init__(self, folder: Path) -> None:
        self.path, self.file = folder, open(folder / "file", "w+")  # noqa: SIM115

    @property
    def trap(self) -> Any:
        raise AssertionError("code of the script's ran")

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"code of the script's ran for {name}")


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("holder.file.read()", "_io.TextIOWrapper"), ("holder.file[3].read().result()", "_io.TextIOWrapper"),
        ("Image.open(path).convert('RGB')", "PIL.Image.open"), ("holder.trap.read()", "HERE.Holder"),
        ("holder.path.joinpath('x')", "pathlib.PosixPath"), ("read()", "_io.TextIOWrapper"),
        ("len(path)", "builtins.len"), ("os.path.join(a)", "posixpath.join"), ("missing.open()", ""),
        ("1 + 2", ""), ("holder.file.read(", ""), ("[x for x in y]", ""), ("odd()", "functools.partial"),
        ("bound()", "builtins.method_descriptor"), ("sys.path.append(1)", "builtins.list"),
    ],
)  # fmt: skip
def test_a_call_is_named_without_running_code_of_the_script(tmp_path: Path, source: str, name: str) -> None:
    import os  # noqa: F401  # in this frame

    holder = Holder(tmp_path)
    bound, odd = types.MethodType(str.lower, "X"), types.MethodType(functools.partial(print), 1)  # noqa: F841
    with holder.file:
        path, read = "x", holder.file.read  # noqa: F841
        assert name_called(source, sys._getframe()) == name.replace("HERE", __name__)


SCRIPT = """
from PIL import Image
def decode(path):
    with Image.open(path) as image:
        return image.convert("RGB")
def own(look):
    return sum(look() for _ in [1])
def reads(buffer, file):
    return file.readinto(
        buffer
    )
def dataset(function, *arguments):
    return function(*arguments)
"""


def test_stacks_have_the_stage_and_the_line_of_the_script(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    script: Any = types.ModuleType("script")
    exec(compile(SCRIPT, str(path), "exec"), script.__dict__)
    linecache.checkcache()
    stacks, seen = Stacks({script.dataset.__code__: Boundary("dataset")}), []

    def look(frame: Any) -> int:
        kind, stage, line = stacks.look(stack_of(frame))
        seen.append((kind, stage, str(line)))
        return 1

    Image.new("RGB", (4, 4)).save(tmp_path / "x.png")
    convert = Image.Image.convert

    def looked_at(self: Any, *args: Any) -> Any:
        look(sys._getframe())
        return convert(self, *args)

    looked_at.__code__ = looked_at.__code__.replace(co_filename=Image.__file__)
    monkeypatch.setattr(Image.Image, "convert", looked_at)
    script.dataset(script.decode, tmp_path / "x.png")
    assert seen.pop()[::2] == ("dataset", "script.py:5 decode")

    def look_at_caller() -> int:
        return look(sys._getframe().f_back)

    script.dataset(script.own, look_at_caller)
    script.own(look_at_caller)
    assert [kind for kind, _, _ in seen] == ["dataset", ""]
    assert all(stage in ("other", "transform") and " own" in line for _, stage, line in seen)
    if sys.version_info >= (3, 11):  # which has columns of calls: a function in C has no frame
        file: Any = type("File", (), {"readinto": lambda self, buffer: look(sys._getframe().f_back)})
        file.__module__ = "h5py.files"
        script.dataset(script.reads, bytearray(b"x"), file())
        assert seen[-1] == ("dataset", "read", "script.py:9 reads")
    assert stacks.is_users(str(path))
    libraries = (Image.__file__, linecache.__file__, "<string>", name_called.__code__.co_filename)
    assert not any(map(stacks.is_users, libraries))


# Garbage whose callbacks let other threads run is made and collected wherever that is possible.
LOCKS_UP = """
import gc, threading, time, weakref
from fastpipe.tools.stacks import current_stacks
class Cycle: pass
left, references = [200], []
def gone(reference):
    if left[0] > 0:
        left[0] -= 1
        time.sleep(0.001)
def look():
    while left[0] > 0:
        cycle = Cycle()
        cycle.itself = cycle
        references.append(weakref.ref(cycle, gone))
        del cycle
        current_stacks()
gc.set_threshold(3)
threads = [threading.Thread(target=look, daemon=True) for _ in range(3)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""


def test_threads_that_take_stacks_while_garbage_is_collected_do_not_lock_up() -> None:
    """As those do with ``sys._current_frames()`` of Python 3.11."""
    assert ran("-c", LOCKS_UP, timeout=120).returncode == 0


@pytest.mark.parametrize("is_enabled", [True, False])
def test_taking_stacks_changes_neither_collection_nor_lives_of_objects(is_enabled: bool, no_gc: None) -> None:
    kept: Any = type("Kept", (), {})()
    (gc.enable if is_enabled else gc.disable)()
    thread = threading.Thread(target=current_stacks)
    thread.start()
    thread.join()
    assert gc.isenabled() == is_enabled
    reference = weakref.ref(kept)
    del kept
    assert reference() is None


@pytest.mark.skipif(
    sys.platform != "linux", reason="run it on Linux, where threads have numbers of the kernel's"
)
def test_numbers_of_threads_are_those_of_the_kernel_while_others_begin_and_end() -> None:
    over = threading.Event()

    def begin_and_end() -> None:
        while not over.is_set():
            thread = threading.Thread(target=int)
            thread.start()
            thread.join()

    threads = [threading.Thread(target=begin_and_end) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(1000):
            found = native_ids()
            assert [found[thread.ident or 0] for thread in threads] == [one.native_id for one in threads]
    finally:
        over.set()
        for thread in threads:
            thread.join()


def test_recorders_that_see_each_other_keep_no_frames_alive(monkeypatch: MonkeyPatch) -> None:
    both = threading.Barrier(2)

    def together(threads: Any) -> Any:
        both.wait()  # each recorder's frames are there when the other one looks
        stacks = current_stacks(threads)
        both.wait()
        return stacks

    class Loader:
        pass

    def iterate() -> weakref.ref[Loader]:
        loader = Loader()
        recording = [threading.Thread(target=Recorder({})._sample) for _ in range(2)]
        for thread in recording:
            thread.start()
        for thread in recording:
            thread.join()
        return weakref.ref(loader)

    monkeypatch.setattr(recorder, "current_stacks", together)
    gc.disable()
    try:
        assert iterate()() is None
    finally:
        gc.enable()
