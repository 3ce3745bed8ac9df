"""Another user of the machine: nothing of theirs is trusted, waited for or removed, nor written through."""

from __future__ import annotations

import gzip
import io
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from generated import made, plain
from PIL import Image
from torchvision.transforms import PILToTensor

import fastpipe
from fastpipe import FastHDF5Dataset, FastImageFolder, FastPatchDataset, Stage, stitch
from fastpipe.bench import data as bench_data
from fastpipe.cli import main
from fastpipe.core import growing_folder as growing
from fastpipe.core.files import open_output, who_else_may_write, write_whole
from fastpipe.core.private_folder import made_folder
from fastpipe.errors import OptionError, StageError, VolumeError
from fastpipe.generation import run
from fastpipe.hdf5 import repack
from fastpipe.sampling import Grid
from fastpipe.tools.folders import Scratch
from fastpipe.tools.quarantine import LIST
from fastpipe.torch import stitching
from fastpipe.torch.transport import remove_names_of

pytestmark = pytest.mark.skipif(getattr(os, "geteuid", int)() != 0, reason="run as root, to be two users")

VICTIM, OTHER, THIRD = 0, 20001, 20002


@contextmanager
def user(number: int) -> Iterator[None]:
    """Be another user of the machine."""
    os.setegid(number)
    os.seteuid(number)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder like /tmp, in which everybody may make files."""
    folder = Path(tempfile.mkdtemp(prefix="fp-users-", dir="/tmp"))
    folder.chmod(0o1777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    before = os.umask(0)
    try:
        yield folder
    finally:
        os.umask(before)
        shutil.rmtree(folder)


def owned_by_other(folder: Path) -> Path:
    """A folder that another user has made, in which everybody may make files."""
    with user(OTHER):
        folder.mkdir()
        folder.chmod(0o777)
    return folder


def images(folder: Path) -> Path:
    (folder / "net" / "a").mkdir(parents=True)
    for number in range(3):
        Image.new("RGB", (16, 16), (number * 20, 0, 0)).save(folder / "net" / "a" / f"{number}.bmp")
    return folder / "net"


def put_another_there(stage: Path, content: Callable[[bytes], bytes]) -> None:
    """As the owner of the folder above it: move a stage away, and make one with the same names."""
    found = (stage / "fastpipe-stage" / "objects").glob("*/*")
    objects = {str(path.relative_to(stage)): content(path.read_bytes()) for path in found}
    assert objects
    with user(OTHER):
        os.rename(stage / "fastpipe-stage", stage / "was")
        for name, data in objects.items():
            (stage / name).parent.mkdir(parents=True, exist_ok=True)
            (stage / name).write_bytes(data)


def white(_: bytes) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (16, 16), (255, 255, 255)).save(file, "BMP")
    return file.getvalue()


def sums(dataset: Any) -> list[int]:
    return [int(np.asarray(dataset[index][0]).sum()) for index in range(len(dataset))]


def test_images_of_a_stage_that_another_user_replaces(shared: Path) -> None:
    root, stage = images(shared), owned_by_other(shared / "stage")
    with user(VICTIM):
        dataset = FastImageFolder(root, PILToTensor(), stage=Stage(stage), cache="off")
        dataset.stage_all()
        before = sums(dataset)
    put_another_there(stage, white)
    with user(VICTIM):
        batch = next(iter(fastpipe.FastLoader(dataset, batch_size=3)))[0]
        assert batch.sum((1, 2, 3)).tolist() == sums(dataset) == before
        dataset.close()
        with pytest.raises(StageError, match=rf"belongs to user {OTHER}.*(Name|Choose) a folder of your own"):
            FastImageFolder(root, PILToTensor(), stage=Stage(stage))
        assert sums(dataset) == before, "fetched each time"
        dataset.close()


def test_a_staged_file_that_another_user_replaces(shared: Path) -> None:
    for name, value in (("x.h5", 1), ("other.h5", 2)):
        with h5py.File(shared / name, "w") as file:
            file.create_dataset("data", data=np.full((8, 4), value), chunks=(2, 4))
    stage = owned_by_other(shared / "stage")
    with user(VICTIM):
        dataset = FastHDF5Dataset(shared / "x.h5", "data", stage=Stage(stage), cache="off")
        assert np.asarray(dataset[0]).tolist() == [1] * 4
    put_another_there(stage, lambda _: (shared / "other.h5").read_bytes())
    with user(VICTIM):
        assert np.asarray(dataset[7]).tolist() == [1] * 4
        dataset.close()
        with pytest.raises(StageError, match=f"belongs to user {OTHER}"):
            dataset[0]


@pytest.mark.parametrize("command", ["--status", "--clear"])
def test_a_stage_of_another_user_is_not_looked_into(shared: Path, command: str, capsys: Any) -> None:
    path = shared / "fastpipe-stage" / "objects" / "ab" / "x"
    with user(OTHER):
        path.parent.mkdir(parents=True)
        path.write_text("mine")
    assert main(["stage", command, str(shared)]) == 2
    assert f"belongs to user {OTHER}" in capsys.readouterr().err and path.exists()


def test_folders_that_are_made_are_no_others_whatever_the_umask(shared: Path) -> None:
    assert made_folder(shared / "a" / "b" / "c") == shared / "a" / "b" / "c"
    assert [(shared / name).stat().st_mode & 0o777 for name in ("a", "a/b", "a/b/c")] == [0o755, 0o755, 0o700]


def test_a_copy_in_a_cache_that_another_user_replaces(shared: Path) -> None:
    nibabel = pytest.importorskip("nibabel", reason="pip install '.[volume]'")
    nibabel.save(nibabel.Nifti1Image(np.ones((8, 8, 8), np.uint8), np.eye(4)), shared / "x.nii")
    (shared / "x.nii.gz").write_bytes(gzip.compress((shared / "x.nii").read_bytes()))
    cache = owned_by_other(shared / "cache")
    with user(VICTIM):
        dataset = FastPatchDataset(shared / "x.nii.gz", (4, 4, 4), sampling=Grid())
    (copy,) = (cache / "fastpipe" / "converted").glob("*.raw")
    size = copy.stat().st_size
    with user(OTHER):
        os.rename(cache / "fastpipe", cache / "was")
        copy.parent.mkdir(parents=True)
        copy.write_bytes(bytes([2]) * size)
        os.utime(copy, ns=(0, (cache / "was").stat().st_mtime_ns))
    with user(VICTIM), pytest.raises(VolumeError, match="changed"):
        dataset[0]


def test_data_of_benchmarks_that_another_user_has_made(shared: Path) -> None:
    with user(OTHER):
        (shared / "cache" / "fastpipe" / "bench" / "photos").mkdir(parents=True)
    with user(VICTIM), pytest.raises(OptionError, match=f"belongs to user {OTHER}.*XDG_CACHE_HOME"):
        bench_data.made_once("photos", Path.mkdir, "photos", None, print)


@pytest.mark.parametrize("kind", ["fifo", "socket", "folder", "link", "file", "none"])
@pytest.mark.parametrize("runs_as", [VICTIM, THIRD])
def test_folders_of_profiles_of_another_user_stay(shared: Path, kind: str, runs_as: int) -> None:
    folder = shared / "fastpipe-profile-left"
    with user(OTHER):
        folder.mkdir(0o777)
        lock = folder / ".lock"
        with socket.socket(socket.AF_UNIX) as opened:
            {"fifo": lambda: os.mkfifo(lock), "folder": lock.mkdir, "link": lambda: lock.symlink_to("/dev/zero"),
             "file": lock.touch, "socket": lambda: opened.bind(str(lock)), "none": lambda: None}[kind]()  # fmt: skip
        if kind != "none":
            os.utime(lock, (1, 1), follow_symlinks=False)
    with user(runs_as):
        Scratch().close()
    assert os.listdir(shared) == [folder.name]


def test_a_folder_of_this_users_profile_that_was_killed_goes(shared: Path) -> None:
    folder = shared / "fastpipe-profile-left"
    with user(THIRD):
        (folder / "more").mkdir(parents=True)
        (folder / ".lock").touch()
        os.utime(folder / ".lock", (1, 1))
        Scratch().close()
    assert os.listdir(shared) == []


def made_by_repack(folder: Path) -> None:
    with h5py.File(folder / "in.h5", "w") as file:
        file.create_dataset("x", data=np.arange(10))
    if main(["repack", str(folder / "in.h5"), str(folder / "out.h5"), "--dataset", "x"]):
        raise OptionError("it was refused")


def made_by_stitch(folder: Path) -> None:
    dataset = FastPatchDataset(np.zeros((4, 4), np.float32), (2, 2), sampling=Grid())
    stitch([np.zeros((len(dataset), 2, 2), np.float32)], dataset, folder / "out.npy")


# What makes a file, its name, the name of the copy while it grows, and what is said where that is odd.
ODD = "is a link, or not a folder: move it away"
WAYS: dict[str, tuple[Callable[[Path], object], str, str, str]] = {
    "generate": (lambda folder: made(plain, folder / "out.h5", 5), "out.h5", "out.h5.partial", ODD),
    "stitch": (made_by_stitch, "out.npy", "out.npy.partial", ODD),
    "repack": (made_by_repack, "out.h5", repack.unfinished_path(Path("out.h5")).name, "is not an unfinished copy"),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["another user's", "open to others", "a link", "a fifo", "the other kind"])
@pytest.mark.parametrize("way", WAYS)
def test_a_copy_does_not_grow_in_a_place_that_others_may_write(
    shared: Path, way: str, kind: str, capsys: Any
) -> None:
    make, name, growing_name, odd = WAYS[way]
    copy, precious, is_file = shared / growing_name, shared / "precious", way == "repack"
    precious.mkdir()
    for one in ("note.json", "state.json", "journal", "data.h5", "array.npy", "00000.data"):
        (precious / one).write_text("{}")
    if kind == "a link":
        copy.symlink_to(precious / "data.h5" if is_file else precious)
    elif kind == "a fifo":
        os.mkfifo(copy)
    else:
        with user(OTHER if kind == "another user's" else VICTIM):
            copy.touch() if is_file != (kind == "the other kind") else copy.mkdir()
        copy.chmod(0o777)
    words = {"another user's": f"belongs to user {OTHER}", "open to others": "lets others write"}
    with pytest.raises(OptionError) as raised:
        make(shared)
    assert words.get(kind, odd) in f"{raised.value} {capsys.readouterr().err}"
    assert len(list(precious.iterdir())) == 6 and (precious / "data.h5").read_text() == "{}"
    assert not (shared / name).exists()


@pytest.mark.parametrize("way", ["generate", "stitch"])
def test_a_copy_that_another_user_replaces_does_not_get_its_name(
    shared: Path, way: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Who owns the folder above moves it away just before the copy gets its name."""
    make, name, growing_name, _ = WAYS[way]
    place, real = owned_by_other(shared / "place"), growing.opened_folder

    def opened_folder(out: Path) -> Any:
        if (place / growing_name / "lock").exists() and not (place / "was").exists():
            with user(OTHER):
                os.rename(place / growing_name, place / "was")
                shutil.copytree(place / "forged", place / growing_name)
        return real(out)

    with user(OTHER):
        (place / "forged").mkdir()
        for one in ("lock", "data.h5", "00000.data", "array.npy"):
            (place / "forged" / one).write_bytes(b"forged")
        (place / "forged" / "array").mkdir()
    for module in (stitching, run):
        monkeypatch.setattr(module, "opened_folder", opened_folder)
    with pytest.raises(OptionError) as raised:
        make(place)
    assert f"belongs to user {OTHER}" in f"{raised.value} {capsys.readouterr().err}"
    assert not (place / name).exists() and (place / "was" / "lock").exists()
    assert len(list((place / growing_name).iterdir())) == 5


@pytest.mark.parametrize("way", WAYS)
def test_no_other_user_may_write_a_copy_that_grows_whatever_the_umask(
    shared: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, name, growing_name, _ = WAYS[way]
    seen: set[int] = set()

    def look(real: Callable[..., Any]) -> Callable[..., Any]:
        def looking(*arguments: Any, **options: Any) -> Any:
            if (shared / growing_name).exists():
                seen.add((shared / growing_name).stat().st_mode & 0o777)
            return real(*arguments, **options)

        return looking

    calls: Any = [(os, "open"), (os, "replace"), (repack, "check_structure"), (repack, "rename_anew")]
    for owner, function in calls:
        monkeypatch.setattr(owner, function, look(getattr(owner, function)))
    make(shared)
    assert seen == ({0o600} if way == "repack" else {0o700})
    assert (shared / name).stat().st_mode & 0o777 == 0o666 and not (shared / growing_name).exists()


def test_memory_of_another_user_with_the_number_of_a_process_of_ours(shared: Path) -> None:
    names = [Path(f"/dev/shm/torch_{os.getpid()}_{number}_0") for number in (0, OTHER)]
    try:
        for name, owner in zip(names, (0, OTHER), strict=True):
            with user(owner):
                name.touch()
        remove_names_of([os.getpid()])
        assert [name.exists() for name in names] == [False, True]
    finally:
        for name in names:
            name.unlink(missing_ok=True)


def test_a_link_of_another_user_is_not_written_through(shared: Path) -> None:
    (shared / "precious").write_text("mine")
    (shared / "own").symlink_to("precious")
    with user(OTHER):
        (shared / "trap").symlink_to("precious")
    with pytest.raises(PermissionError):
        open_output(shared / "trap")
    write_whole(shared / "trap", lambda file: file.write(b"report"))
    assert (shared / "precious").read_text() == "mine" and not (shared / "trap").is_symlink()
    os.close(open_output(shared / "own"))
    assert (shared / "precious").read_text() == "", "a link of one's own leads where one wants it"


def test_who_else_may_write(shared: Path) -> None:
    for name, owner, mode, found in (
        ("own", THIRD, 0o755, ""), ("roots", 0, 0o755, ""), ("open", THIRD, 0o775, "lets others write (mode 0775)"),
        ("others", OTHER, 0o755, f"belongs to user {OTHER}, not to user {THIRD}, who runs this"),
    ):  # fmt: skip
        (shared / name).mkdir()
        os.chown(shared / name, owner, owner)
        (shared / name).chmod(mode)
        with user(THIRD):
            descriptor = os.open(shared / name, os.O_RDONLY)
            assert who_else_may_write(descriptor, os.fstat(descriptor), root_may=name == "roots") == found
            os.close(descriptor)


def scanned(shared: Path) -> tuple[Path, Path]:
    """A folder whose corrupt image is in a quarantine."""
    root, quarantine = images(shared), shared / "quarantine"
    (root / "a" / "bad.bmp").write_bytes(b"no image")
    assert main(["scan", str(root), "--quarantine", str(quarantine)]) == 0
    assert (quarantine / "a" / "bad.bmp").exists()
    return root, quarantine


@pytest.mark.parametrize("place", ["folder", "list"])
@pytest.mark.parametrize("change", ["owner", "mode", "fifo"])
def test_a_quarantine_to_which_others_may_write_is_refused(
    shared: Path, place: str, change: str, capsys: Any
) -> None:
    root, quarantine = scanned(shared)
    path = quarantine / LIST if place == "list" else quarantine
    assert [one.stat().st_mode & 0o777 for one in (quarantine, quarantine / LIST)] == [0o755, 0o644]
    if change == "owner":
        os.chown(path, OTHER, OTHER)
    elif change == "mode":
        path.chmod(0o777)
    else:
        (quarantine / LIST).unlink()
        os.mkfifo(quarantine / LIST)
    assert main(["scan", "--restore", str(quarantine)]) == 2
    words = {"owner": f"belongs to user {OTHER}", "mode": "lets others write", "fifo": "it has no"}
    assert words[change] in capsys.readouterr().err
    (root / "a" / "more.bmp").write_bytes(b"no image")
    assert main(["scan", str(root), "--quarantine", str(quarantine)]) == 2
    assert (quarantine / "a" / "bad.bmp").exists() and (root / "a" / "more.bmp").exists()


def test_root_may_keep_a_quarantine(shared: Path) -> None:
    root, quarantine = scanned(shared)
    for path in (root, *root.rglob("*"), quarantine / "a"):
        os.chown(path, THIRD, THIRD)
    unfinished = root / "a" / f"x.bmp.{os.getpid()}.01234567.unfinished"
    unfinished.touch()
    os.chown(unfinished, OTHER, OTHER)
    with user(THIRD):
        assert main(["scan", "--restore", str(quarantine)]) == 2, "the list cannot be written"
    assert main(["scan", "--restore", str(quarantine)]) == 0
    assert (root / "a" / "bad.bmp").exists() and not quarantine.exists()
    assert unfinished.exists(), "another user's"


@pytest.mark.parametrize("where", ["in the quarantine", "in the folder", "the folder", "above the folder"])
def test_files_go_back_by_way_of_no_link(shared: Path, where: str) -> None:
    root, quarantine = scanned(shared)
    private = shared / "private"
    private.mkdir()
    (private / "bad.bmp").write_text("private")
    if where == "in the quarantine":
        shutil.move(quarantine / "a", shared / "elsewhere")
        (quarantine / "a").symlink_to(private)
    elif where == "in the folder":
        shutil.rmtree(root / "a")
        (root / "a").symlink_to(private)
        (private / "bad.bmp").unlink()
    else:
        record = json.loads((quarantine / LIST).read_text())
        (shared / "moved" / "a").mkdir(parents=True)
        (shared / "link").symlink_to(shared / "moved" if where == "the folder" else shared)
        record["root"] = str(shared / "link" / ("" if where == "the folder" else "moved")).rstrip("/")
        (quarantine / LIST).write_text(json.dumps(record) + "\n")
    assert main(["scan", "--restore", str(quarantine)]) == 1
    assert os.listdir(private) == ["bad.bmp"][: where != "in the folder"]
    assert (quarantine / LIST).exists() and not list(shared.glob("moved/a/*"))


def test_lines_of_a_list_that_lead_elsewhere_are_skipped(shared: Path) -> None:
    root, quarantine = scanned(shared)
    (precious := shared / "precious").write_text("mine")
    paths: list[Any] = ["../precious", "a/../../precious", "/etc/passwd", LIST, "a/bad.bmp\0", "", ".", 3]
    lines = [{"path": path, "root": str(root)} for path in paths]
    lines += [{"path": "a/bad.bmp", "root": folder} for folder in ("relative", "/a/../b", "", None, "/a\0")]
    for line in lines:
        (quarantine / LIST).write_text(json.dumps(line) + "\n")
        (quarantine / LIST).chmod(0o644)
        assert main(["scan", "--restore", str(quarantine)]) == 0
        assert precious.read_text() == "mine" and not (root / "a" / "bad.bmp").exists()
        assert (quarantine / "a" / "bad.bmp").exists()


def test_a_folder_that_is_gone_is_not_made_anew(shared: Path, capsys: Any) -> None:
    root, quarantine = scanned(shared)
    root.rename(shared / "moved")
    assert main(["scan", "--restore", str(quarantine)]) == 1
    assert f"there is no folder {root}: make it first, or name another one" in capsys.readouterr().out
    assert not root.exists()
    assert main(["scan", "--restore", str(quarantine), str(shared / "moved")]) == 0
    assert (shared / "moved" / "a" / "bad.bmp").exists()
