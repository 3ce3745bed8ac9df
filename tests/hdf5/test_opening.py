"""Opening of files: their datasets, files that are being written, errors of the library, and filters that are missing."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import numpy as np
import pytest
from hdf5_kit import flip

from fastpipe import FastHDF5Dataset, FastLoader, FastPatchDataset
from fastpipe.cli import main
from fastpipe.errors import HDF5Error, MissingDependencyError
from fastpipe.hdf5.files import SampleFile
from fastpipe.hdf5.opening import DamagedError, datasets_of, library_errors, open_library, walk_datasets
from fastpipe.sampling import Grid

ROWS = np.arange(512, dtype="f4").reshape(64, 8)

_WRITER = """
import h5py, numpy as np, sys
file = h5py.File(sys.argv[1], "w", libver=sys.argv[2])
x = file.create_dataset("x", (64, 8), "f4", chunks=(8, 8), maxshape=(None, 8), compression="gzip")
x[...] = np.arange(512).reshape(64, 8)
if sys.argv[3] == "swmr":
    file.swmr_mode = True
file.flush()
print("ready", flush=True)
for line in sys.stdin:
    if line == "grow\\n":
        x.resize((80, 8)); x[64:] = -1; x.flush()
    else:
        file.close()
    print("done", flush=True)
"""


class Writer(subprocess.Popen[str]):
    """A process that has a file open for writing."""

    def __init__(self, path: Path, mode: str, libver: str) -> None:
        pipe = subprocess.PIPE
        command = [sys.executable, "-c", _WRITER, str(path), libver, mode]
        super().__init__(command, stdin=pipe, stdout=pipe, text=True)
        self.path = path
        self._heard()

    def ask(self, what: str) -> None:
        print(what, file=self.stdin, flush=True)
        self._heard()

    def killed(self) -> Path:
        self.kill()
        self.wait()
        return self.path

    def _heard(self) -> None:
        assert self.stdout is not None
        assert self.stdout.readline() in ("ready\n", "done\n")


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Callable[..., Writer]]:
    """Start a process that writes until the test ends: ``writer(mode, libver)``."""
    with ExitStack() as found:
        yield lambda mode, libver="latest": found.enter_context(Writer(tmp_path / "x.h5", mode, libver))


def rows_of(dataset: Any, workers: int = 0) -> Any:
    loader = FastLoader(dataset, 8, num_workers=workers, workers="processes" if workers else "threads")
    return np.concatenate([batch.numpy() for batch in loader])


def _patches(path: Path, **options: Any) -> Any:
    return FastPatchDataset(path / "x", (16, 8), sampling=Grid(), **options)


def joined(patches: Any) -> Any:
    return np.concatenate([patches[number] for number in range(4)])


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_file_that_is_written_by_swmr_is_read(writer: Any, is_killed: bool, tmp_path: Path) -> None:
    path = writer("swmr").killed() if is_killed else writer("swmr").path
    dataset = FastHDF5Dataset(path, "x")
    assert "its file is marked as being written in SWMR mode" in str(dataset)
    np.testing.assert_array_equal(rows_of(dataset, workers=1), ROWS)
    np.testing.assert_array_equal(rows_of(dataset), ROWS)
    np.testing.assert_array_equal(joined(_patches(path)), ROWS)
    out = str(tmp_path / "copy.h5")
    for arguments in (["inspect", str(path)], ["scan", str(path)], ["repack", str(path), out]):
        assert main(arguments) == 0
    with h5py.File(out) as file:
        np.testing.assert_array_equal(file["x"], ROWS)


def test_a_file_that_grows_is_read_as_it_was_opened(writer: Any) -> None:
    """The writer changes the file, which is no reason for an error; a dataset that is made later has more."""
    one = writer("swmr")
    dataset, patches = FastHDF5Dataset(one.path, "x"), _patches(one.path)
    for step in ("grow", "grow", "close"):
        np.testing.assert_array_equal(rows_of(dataset), ROWS)
        one.ask(step)
        assert (len(dataset), len(FastHDF5Dataset(one.path, "x"))) == (64, 80)
    np.testing.assert_array_equal(rows_of(dataset), ROWS)
    np.testing.assert_array_equal(rows_of(dataset, workers=1), ROWS)
    np.testing.assert_array_equal(joined(patches), ROWS)


def test_another_file_at_the_path_of_one_that_is_written_is_noticed(writer: Any) -> None:
    one = writer("swmr")
    datasets = FastHDF5Dataset(one.path, "x", bad_samples="skip"), _patches(one.path, bad_samples="skip")
    with h5py.File(one.path.with_name("new.h5"), "w") as file:
        file["x"] = ROWS + 1
    os.replace(one.path.with_name("new.h5"), one.path)
    for each in datasets:
        with pytest.raises(OSError, match=r"x\.h5 has changed since it was opened"):
            each[0]


def test_files_that_this_process_writes_are_read_if_it_does_so_by_swmr(tmp_path: Path) -> None:
    """Else the library would hand that file out again, whose latest values may not be on the disk."""
    path = tmp_path / "x.h5"
    with h5py.File(path, "w", libver="latest") as file:
        file.create_dataset("x", data=ROWS, chunks=(8, 8), maxshape=(None, 8))
        with pytest.raises(HDF5Error, match=r"x\.h5 is open for writing in this process: close it"):
            SampleFile(path, ["x"])
        file.swmr_mode = True
        np.testing.assert_array_equal(rows_of(FastHDF5Dataset(path, "x")), ROWS)
    with h5py.File(path, "r"):
        SampleFile(path, ["x"])


_OPENERS: list[Callable[[str], object]] = [
    lambda path: FastHDF5Dataset(path, "x"), lambda path: FastHDF5Dataset(path, "x", bad_samples="skip"),
    lambda path: FastPatchDataset(f"{path}/x", (8, 8), sampling=Grid()), open_library,
]  # fmt: skip


@pytest.mark.parametrize("libver", ["latest", "earliest"])
def test_a_file_that_is_open_for_writing_is_refused(writer: Any, libver: str, capsys: Any) -> None:
    one = writer("plain", libver)
    path = str(one.path)
    for opener in _OPENERS:
        with pytest.raises(HDF5Error, match=r"x\.h5 is open for writing elsewhere: close it there") as caught:
            opener(path)
        assert "cut off" not in str(caught.value)
    for arguments in (["inspect", path], ["scan", path], ["repack", path, f"{path}.out"]):
        assert main(arguments) == 2
        assert "is open for writing elsewhere" in capsys.readouterr().err
    one.ask("close")
    open_library(path).close()


def test_the_mark_that_a_killed_writer_left_is_explained(writer: Any, capsys: Any) -> None:
    path = str(writer("plain").killed())
    for opener in _OPENERS:
        with pytest.raises(HDF5Error, match=r"x\.h5 is marked as open for writing: .* h5clear -s") as caught:
            opener(path)
        assert "cut off" not in str(caught.value)
    assert main(["inspect", path]) == 2
    assert "h5clear -s" in capsys.readouterr().err


def test_the_mark_is_found_behind_a_user_block(tmp_path: Path) -> None:
    code = "import h5py, os, sys; file = h5py.File(sys.argv[1], 'w', libver='latest', userblock_size=1024); "
    code += "file['x'] = 5; file.flush(); os._exit(0)"
    subprocess.run([sys.executable, "-c", code, tmp_path / "x.h5"], check=True)
    with pytest.raises(HDF5Error, match="h5clear -s"):
        open_library(str(tmp_path / "x.h5"))


def test_the_mark_reveals_a_writer_where_there_are_no_locks(writer: Any) -> None:
    code = "import sys; from fastpipe.hdf5.opening import open_library; open_library(sys.argv[1])"
    command, environment = [sys.executable, "-c", code, writer("plain").path], dict(os.environ)
    environment["HDF5_USE_FILE_LOCKING"] = "FALSE"
    run = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True)
    assert "is marked as open for writing: wait until its writer has closed it" in run.stderr


@pytest.mark.parametrize(
    ("error", "expected", "text"),
    [
        (OSError("Can't read data (filter returned failure)"), DamagedError, "x.h5 cannot be read, it may be"),
        (RuntimeError("wrong B-tree signature"), DamagedError, "wrong B-tree signature; restore"),
        (KeyError("Unable to open object"), DamagedError, "damaged: Unable to open object;"),
        (ValueError("invalid"), DamagedError, "damaged: invalid"),
        (TypeError("no conversion path"), DamagedError, "damaged: no conversion path"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), DamagedError, "invalid start byte"),
        (OverflowError("too large"), DamagedError, "too large"),
        (OSError(errno.EIO, "read failed"), DamagedError, "read failed"),
        (OSError(errno.EMFILE, "Too many open files"), OSError, r"x\.h5: Too many open files"),
        (FileNotFoundError(errno.ENOENT, "No such file"), FileNotFoundError, r"x\.h5: No such file"),
        (PermissionError(errno.EACCES, "Permission denied"), PermissionError, r"x\.h5: Permission denied"),
        (MemoryError("Unable to allocate 4. EiB"), HDF5Error, r"x\.h5 .* claims a size that exceeds the memory"),
        (RuntimeError("x (memory allocation failed for chunk)"), HDF5Error, "claims a size that exceeds the memory"),
        (OSError("x (unable to open external raw data file)"), HDF5Error, "another file, which cannot be"),
        (OSError("x (can't open directory (/usr/local))"), MissingDependencyError, r"x\.h5: .* hdf5plugin"),
        (OSError("required filter 'x' is not registered"), MissingDependencyError, "takes a filter, which"),
        (OSError("x (filter plugins disabled)"), MissingDependencyError, "takes a filter, which"),
        (MissingDependencyError("pip install it"), MissingDependencyError, "^pip install it$"),
    ],
)  # fmt: skip
def test_an_error_of_h5py_has_its_meaning(error: BaseException, expected: type[Exception], text: str) -> None:
    raising: dict[str, Any] = {"__name__": "h5py.h5d"}
    exec("def read(error): raise error", raising)
    with pytest.raises(expected, match=text) as caught, library_errors("x.h5", DamagedError):
        raising["read"](error)
    assert type(caught.value) is expected


@pytest.mark.parametrize("error", [KeyError("x"), RuntimeError("x"), ValueError("x")])
def test_an_error_that_h5py_did_not_raise_is_not_called_damage(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, library_errors("x.h5"):
        raise error
    assert raised.value is error


@pytest.mark.parametrize("policy", ["raise", "skip", "replace"])
def test_values_in_another_file_that_is_gone_are_an_error(tmp_path: Path, policy: Any) -> None:
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", (4, 2), "f8", external=[(tmp_path / "gone.bin", 0, 64)])
    rows = FastHDF5Dataset(path, "x", bad_samples=policy)
    patches = FastPatchDataset(path / "x", (4, 2), sampling=Grid(), bad_samples=policy)
    said = r"x\.h5.*: its values are in another file, which cannot be opened"
    for dataset in (rows, patches):
        with pytest.raises(HDF5Error, match=said):
            dataset[0]


def virtual(file: Any, name: str, *sources: tuple[str, str]) -> None:
    """A dataset whose rows are those of several sources, in turn."""
    layout = h5py.VirtualLayout((20, 4), "f8")
    for number, (path, inside) in enumerate(sources):
        layout[number :: len(sources)] = h5py.VirtualSource(path, inside, (20, 4))[number :: len(sources)]
    file.create_virtual_dataset(name, layout)


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    """A folder with files whose datasets need filters."""
    data, unknown = np.arange(80.0).reshape(20, 4), {"compression": 32999, "compression_opts": (1,)}
    with h5py.File(tmp_path / "s.h5", "w") as file:
        file.create_dataset("plain", data=data, chunks=(4, 4), compression="gzip")
        file.create_dataset("blosc", data=data, chunks=(4, 4), **hdf5plugin.Blosc())
        file.create_dataset("zfp", data=data, chunks=(4, 4), **hdf5plugin.Zfp(reversible=True))
        file.create_dataset("unwritten", (20, 4), "f8", chunks=(4, 4), **hdf5plugin.Zfp(reversible=True))
        for name, mask in (("unknown", 0), ("left out", 1)):
            options = {"chunks": (4, 4), "maxshape": (None, None), "allow_unknown_filter": True, **unknown}
            made = file.create_dataset(name, (20, 4), "f8", **options)
            for row in range(0, 20, 4):
                made.id.write_direct_chunk((row, 0), data[row : row + 4].tobytes(), mask)
        virtual(file, "own", (".", "blosc"))
    with h5py.File(tmp_path / "v.h5", "w") as file:
        virtual(file, "blosc", ("s.h5", "plain"), ("s.h5", "blosc"))
        virtual(file, "moved", ("/elsewhere/s.h5", "zfp"))
        virtual(file, "unknown", ("s.h5", "unknown"))
        virtual(file, "left out", ("s.h5", "left out"))
        virtual(file, "gone", ("s.h5", "plain"), ("gone.h5", "blosc"), ("s.h5", "no such"))
        file["link"] = h5py.ExternalLink("s.h5", "zfp")
    with h5py.File(tmp_path / "n.h5", "w") as file:
        virtual(file, "nested", ("v.h5", "blosc"))
        virtual(file, "linked", ("v.h5", "link"))
    return tmp_path


_NEEDS_PLUGIN = ["s.h5/zfp", "s.h5/own", *("v.h5/" + name for name in ("blosc", "moved", "link"))]
_NEEDS_PLUGIN += ["n.h5/nested", "n.h5/linked"]
_UNKNOWN = ["s.h5/unknown", "v.h5/unknown"]
_READ_ANYWAY = ["s.h5/blosc", "s.h5/unwritten", "s.h5/left out", "v.h5/left out", "v.h5/gone"]

_READ = """
import sys
if sys.argv[1] == "missing":
    sys.modules["hdf5plugin"] = None
if sys.argv[1] == "broken":
    sys.path.insert(0, sys.argv[2])
import numpy as np
from fastpipe import FastHDF5Dataset, FastPatchDataset
from fastpipe.sampling import Grid
for number, place in enumerate(sys.argv[3:]):
    path, name = place.split("/")
    policy = ("raise", "skip", "replace")[number % 3]
    for make in (
        lambda: FastHDF5Dataset(f"{sys.argv[2]}/{path}", name, bad_samples=policy),
        lambda: FastPatchDataset(f"{sys.argv[2]}/{place}", (20, 4), sampling=Grid(), bad_samples=policy),
    ):
        try:
            print(place, "|", np.asarray(make()[0]).sum())
        except Exception as error:
            print(place, "|", type(error).__name__, error)
"""


def _said(how: str, folder: Path, places: list[str]) -> list[tuple[str, str]]:
    environment = {name: value for name, value in os.environ.items() if name != "HDF5_PLUGIN_PATH"}
    command = [sys.executable, "-c", _READ, how, folder, *places]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    found = [tuple(line.split(" | ")) for line in run.stdout.splitlines()]
    assert len(found) == 2 * len(places)
    return found  # type: ignore[return-value]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("how", "remedy"),
    [
        ("missing", "is not installed. Install it with:  pip install hdf5plugin"),
        ("broken", "cannot be imported: OSError: no such library. Install it anew with:  pip install --force"),
    ],
)  # fmt: skip
def test_a_filter_that_hdf5plugin_brings_is_missing_with_the_remedy(odd: Path, how: str, remedy: str) -> None:
    """Also if a source has it: it is missing when the dataset is made, whatever is done about bad samples."""
    (odd / "hdf5plugin").mkdir()
    (odd / "hdf5plugin/__init__.py").write_text("raise OSError('no such library')")
    for place, text in _said(how, odd, [*_NEEDS_PLUGIN, *_READ_ANYWAY]):
        path, name = place.split("/")
        if place in _READ_ANYWAY:
            assert "Error" not in text, f"{place}: {text}"
            continue
        assert text.startswith(f"MissingDependencyError {odd / path}, dataset /"), text
        assert "reading it takes the filter 320" in text
        assert remedy in text


def test_a_filter_that_hdf5plugin_does_not_bring_is_missing(odd: Path) -> None:
    for place, text in _said("there", odd, [*_UNKNOWN, *_NEEDS_PLUGIN, *_READ_ANYWAY]):
        if place not in _UNKNOWN:
            assert "Error" not in text, f"{place}: {text}"
            continue
        assert text.startswith("MissingDependencyError")
        assert "the filter 32999, which the HDF5 library does not have: hdf5plugin does not bring it" in text
        assert "HDF5_PLUGIN_PATH" in text


def test_values_that_h5py_fills_in_for_missing_sources_are_read(odd: Path) -> None:
    with h5py.File(odd / "v.h5") as file:
        expected = file["gone"][...]
    assert not expected[1::3].any()
    np.testing.assert_array_equal(rows_of(FastHDF5Dataset(odd / "v.h5", "gone")), expected)


def test_a_missing_filter_is_no_damage_to_the_commands(odd: Path, capsys: Any) -> None:
    for arguments in (["scan"], ["repack", str(odd / "out.h5"), "--codec", "gzip"]):
        assert main([arguments[0], str(odd / "v.h5"), *arguments[1:]]) == 2
        said = capsys.readouterr()
        assert "v.h5, dataset /unknown: reading it takes the filter 32999" in said.err
        assert "corrupt" not in said.out
    assert main(["inspect", str(odd / "v.h5")]) == 0
    said = capsys.readouterr().out
    assert "/unknown: its filter filter 32999 is not in the HDF5 library here" in said
    assert "install and import the package that brings filter 32999" in said


def test_a_source_is_looked_for_where_the_library_looks(odd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (odd / "far").mkdir()
    os.replace(odd / "s.h5", odd / "far/s.h5")
    SampleFile(odd / "v.h5", ["unknown"])  # the library does not find it either, and gives the fill value
    monkeypatch.setenv("HDF5_VDS_PREFIX", "${ORIGIN}/far")
    with pytest.raises(MissingDependencyError, match="filter 32999"):
        SampleFile(odd / "v.h5", ["unknown"])


def names_of(path: Path) -> list[str]:
    with h5py.File(path) as file:
        return [name for name, item in walk_datasets(file, "x.h5") if not isinstance(item, HDF5Error)]


@pytest.mark.parametrize(("libver", "tracks"), [("earliest", True), ("latest", False), ("latest", True)])
def test_the_datasets_of_a_file_are_those_of_visititems(tmp_path: Path, libver: Any, tracks: bool) -> None:
    """Each once, in order, whatever links lead where."""
    path, found = tmp_path / "x.h5", list[Any]()
    with h5py.File(path, "w", libver=libver, track_order=tracks) as file:
        for name in ("b", "a/c", "a/b/d", "Z", "ü", "z/y/x", "a/a"):
            file[name] = 1
        file["again"] = file["a/b/d"]  # one dataset of two names
        file["z/up"], file["z/y/own"] = file["z"], file["z/y"]
        file["a/root"] = file["/"]
        file["soft"], file["loop"] = h5py.SoftLink("/b"), h5py.SoftLink("/loop")
        file["out"], file["gone"] = h5py.ExternalLink("x.h5", "/out"), h5py.ExternalLink("nothing.h5", "/")
        file["type"], file["empty"] = np.dtype("i4"), h5py.Empty("f4")
        file.visititems(lambda name, item: found.append((name, isinstance(item, h5py.Dataset))))
    assert names_of(path) == [f"/{name}" for name, is_dataset in found if is_dataset]


def test_groups_that_are_nested_deeply_are_walked(tmp_path: Path) -> None:
    path, name = tmp_path / "x.h5", "/g" * 1200 + "/x"
    with h5py.File(path, "w", libver="latest") as file:
        group = file
        for _ in range(1200):
            group = group.create_group("g")
        group["x"] = np.arange(3)
    assert names_of(path) == [name]
    assert FastHDF5Dataset(path, name)[2] == 2
    for command in ("inspect", "scan"):
        assert main([command, str(path)]) == 0


def test_a_dataset_that_cannot_be_opened_is_named_and_the_others_read(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "x.h5"
    with h5py.File(path, "w", libver="latest") as file:
        for name in ("group/a", "group/b", "group/c"):
            file[name] = np.arange(5)
        address = h5py.h5o.get_info(file["group/b"].id).addr
    flip(path, address + 20)
    assert names_of(path) == ["/group/a", "/group/c"]
    assert FastHDF5Dataset(path, "group/c")[4] == 4
    with pytest.raises(KeyError, match=r"has no dataset 'x'; it has group/a, group/c"):
        FastHDF5Dataset(path, "x")
    with pytest.raises(HDF5Error, match=r"x\.h5: 'group/b' cannot be opened, it may be damaged"):
        FastHDF5Dataset(path, "group/b")
    with h5py.File(path) as file, pytest.raises(HDF5Error, match=r"y\.h5, /group/b cannot be read"):
        datasets_of(file, "y.h5")
    assert main(["scan", str(path)]) == 1
    assert "/group/b" in capsys.readouterr().out
    for arguments in (["inspect", str(path)], ["repack", str(path), f"{path}.out"]):
        assert main(arguments) == 2
        assert "x.h5, /group/b cannot be read, it may be damaged" in capsys.readouterr().err


def test_datasets_with_names_that_are_no_utf8_are_read(tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file[b"caf\xe9"] = np.arange(6)
        options = {"chunks": (2,), "scaleoffset": 0}  # which only the library reads
        file.create_dataset(b"th\xe9", data=np.arange(6), **options)
    for name in ("caf\udce9", "th\udce9"):
        assert [int(row) for row in FastHDF5Dataset(path, name)] == list(range(6))
