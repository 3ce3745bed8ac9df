"""Which stage a function, a call and a stack belong to."""

from __future__ import annotations

import functools
import linecache
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from fastpipe.tools.stacks import Boundary, Stacks, name_called, stack_of, stage_of


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("_io.BufferedReader", "read"), ("builtins.open", "read"), ("h5py._hl.files.File.__init__", "read"),
        ("tensorstore.TensorStore", "read"), ("s3fs.core.S3FileSystem._cat_file", "read"),
        ("PIL.Image.open", "decode"), ("PIL.Image.Image.convert", "decode"), ("cv2.imread", "decode"),
        ("PIL.JpegImagePlugin.JpegImageFile.draft", "decode"), ("zlib.decompress", "decode"),
        ("PIL.Image.Image.resize", "transform"), ("PIL.Image.Image.crop", "transform"), ("cv2.resize", "transform"),
        ("torchvision.io.image.decode_jpeg", "decode"), ("torch.nn.functional.pad", "transform"),
        ("torchvision.transforms.v2._geometry.Resize.forward", "transform"), ("numpy.stack", "transform"),
        ("torch.utils.data._utils.collate.default_collate", "collate"), ("torch.load", "read"),
        ("multiprocessing.queues.Queue.put", "transfer"), ("my.scripts.Thing", None), ("", None),
        ("torchaudio.transforms._transforms.MelSpectrogram.forward", "transform"),
    ],
)  # fmt: skip
def test_a_function_belongs_to_its_packages_stage(name: str, stage: str | None) -> None:
    assert stage_of(name) == stage


class Holder:
    """Has a property that must not run, and attributes."""

    def __init__(self, tmp_path: Path) -> None:
        self.path = tmp_path
        self.file = open(tmp_path / "file", "w+")  # noqa: SIM115

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
        ("len(path)", "builtins.len"), ("zlib.compress(path)", "zlib.compress"), ("missing.open()", ""),
        ("1 + 2", ""), ("holder.file.read(", ""), ("[x for x in y]", ""), ("os.path.join(a)", "posixpath.join"),
        ("sys.path.append(1)", "builtins.list"), ("bound()", "builtins.method_descriptor"),
        ("odd()", "functools.partial"),
    ],
)  # fmt: skip
def test_a_call_is_named_and_nothing_runs(tmp_path: Path, source: str, name: str) -> None:
    import os  # noqa: F401  # in this frame
    import zlib  # noqa: F401

    holder = Holder(tmp_path)
    bound, odd = types.MethodType(str.lower, "X"), types.MethodType(functools.partial(print), 1)  # noqa: F841
    with holder.file:
        path, read = "x", holder.file.read  # noqa: F841
        assert name_called(source, sys._getframe()) == name.replace("HERE", __name__)


SCRIPT = """
import sys
import numpy as np
from PIL import Image

def decode(look, path):
    with Image.open(path) as image:
        return image.convert("RGB")

def own(look):
    return sum(look() for _ in [1])

def reads(look, file):
    class Now(bytes):
        pass
    return file.readinto(
        look
    )

def dataset(function, *arguments):
    return function(*arguments)
"""


@pytest.fixture
def script(tmp_path: Path) -> types.ModuleType:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    module = types.ModuleType("script")
    exec(compile(SCRIPT, str(path), "exec"), module.__dict__)
    linecache.checkcache()
    return module


def looking(script: types.ModuleType) -> tuple[Stacks, list[Any]]:
    return Stacks({script.dataset.__code__: Boundary("dataset")}), []


def test_a_stack_has_the_scripts_line_and_the_stage_of_what_is_below_it(
    script: types.ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stacks, seen = looking(script)
    Image.new("RGB", (4, 4)).save(tmp_path / "x.png")
    convert = Image.Image.convert

    def looked_at(self: Any, *args: Any) -> Any:
        seen.append(stacks.look(stack_of(sys._getframe())))
        return convert(self, *args)

    looked_at.__code__ = looked_at.__code__.replace(co_filename=Image.__file__)
    monkeypatch.setattr(Image.Image, "convert", looked_at)
    script.dataset(script.decode, None, tmp_path / "x.png")
    ((kind, _, line),) = seen
    assert (kind, Path(line.file).name, line.line, line.function) == ("dataset", "script.py", 8, "decode")
    assert str(line) == "script.py:8 decode"


def test_the_scripts_own_code_is_other_and_outside_a_boundary_has_no_kind(script: types.ModuleType) -> None:
    stacks, seen = looking(script)

    def look() -> int:
        frame = sys._getframe().f_back
        seen.append(stacks.look(stack_of(frame)))
        return 1

    script.dataset(script.own, look)
    script.own(look)
    assert [kind for kind, _, _ in seen] == ["dataset", ""]
    assert all(stage in ("other", "transform") and line.function.startswith("own") for _, stage, line in seen)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="columns of calls: needs Python 3.11 or later")
def test_a_function_in_c_is_known_by_the_call_that_is_under_way(
    script: types.ModuleType, tmp_path: Path
) -> None:
    stacks, seen = looking(script)

    class Buffer(bytearray):
        """Asked for its memory while ``readinto`` runs, which has no frame."""

    class File:
        def readinto(self, buffer: Any) -> None:
            seen.append(stacks.look(stack_of(sys._getframe().f_back)))

    File.__module__ = "h5py.files"
    script.dataset(script.reads, Buffer(b"x"), File())
    ((kind, stage, line),) = seen
    assert (kind, stage, line.function) == ("dataset", "read", "reads")


def test_files_of_libraries_and_those_that_are_none_are_not_the_scripts(script: types.ModuleType) -> None:
    stacks = Stacks({})
    assert stacks.is_users(script.own.__code__.co_filename)
    assert not any(
        map(
            stacks.is_users,
            (Image.__file__, linecache.__file__, "<string>", name_called.__code__.co_filename),
        )
    )
