"""``fastpipe verify``: it passes where all is equal, and fails where any sample is not."""

from __future__ import annotations

import io
import json
import random
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from odd_images import odd_images
from PIL import Image
from rich.console import Console
from torchvision import transforms, tv_tensors
from torchvision.datasets import ImageFolder

import fastpipe
from fastpipe.bench.check import Check
from fastpipe.bench.synthetic import photo_tree
from fastpipe.errors import OptionError
from fastpipe.images.batch import ImageBatch
from fastpipe.images.cache import ImageCache
from fastpipe.images.reader import ImageReader
from fastpipe.options import Cache
from fastpipe.tools.comparison import (
    NAMED,
    Chain,
    Failure,
    Outcome,
    UnlikeError,
    _add,
    _Try,
    array_pairs,
    chain_of,
    chosen,
    compare_folder,
)
from fastpipe.tools.verify import content, print_outcome, sentence
from fastpipe.torch.batches import Items
from fastpipe.torch.image_folder import FastImageFolder

AGAIN = "another result when it is called again"
SMALL = transforms.Compose([transforms.Resize(20), transforms.CenterCrop(16), transforms.ToTensor()])


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small folder that a test may spoil: 2 classes of 3."""
    return photo_tree(tmp_path / "tree", classes=2, per_class=3, sizes=(60, 90))


def leave_to_python(patch: pytest.MonkeyPatch, path: Path) -> None:
    """Have the native core leave a file to Python, where its pixels can be changed."""
    described = ImageBatch._described

    def left(self: ImageBatch, *arguments: Any) -> Any:
        self._files = {n: False for n, item in enumerate(self.items) if item.path == str(path)}
        return described(self, *arguments)

    patch.setattr(ImageBatch, "_described", left)


def darken(patch: pytest.MonkeyPatch, path: Path) -> None:
    """Have the fast decoder make all pixels of one file darker by 3."""
    blob_of_it, real = path.read_bytes(), ImageReader.fast_region

    def region(self: ImageReader, blob: bytes, box: Any) -> Any:
        pixels: Any = real(self, blob, box)
        return np.where(pixels >= 3, pixels - 3, pixels).astype(np.uint8) if blob == blob_of_it else pixels

    patch.setattr(ImageReader, "fast_region", region)
    leave_to_python(patch, path)


def compared(folder: Path, transform: Any = "eval", count: int | None = None, seed: int = 0) -> Outcome:
    is_name = isinstance(transform, str)
    chain = chain_of(transform) if is_name else Chain("mine:transform", "", transform, 4, is_own=True)
    return compare_folder(ImageFolder(folder), chain, count, seed)


@given(st.integers(1, 400), st.integers(1, 500), st.integers(0, 9))
def test_chosen_images_are_spread_evenly(total: int, count: int, seed: int) -> None:
    found = chosen(total, count, seed)
    assert len(found) == len(set(found)) == min(total, count)
    assert found == sorted(found) == chosen(total, count, seed)
    for at, index in enumerate(found):
        assert at * total // len(found) <= index < (at + 1) * total // len(found)
    assert chosen(1000, 10, seed) != chosen(1000, 10, seed + 1)


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.filterwarnings("ignore::UserWarning:PIL", "ignore:Palette images with Transparency")
def test_photographs_and_odd_files_are_equal_or_unreadable_for_both(
    photos: Path, tmp_path: Path, name: str
) -> None:
    outcome = compared(photos, name, count=20)
    assert outcome.equal and outcome.check.photos == outcome.seen == outcome.chosen == min(20, outcome.total)
    assert outcome.check.values > 0 and (outcome.check.largest, outcome.check.differing) == (0, 0)
    cases = {str(case.path): case.expect for case in odd_images(tmp_path / "odd")}
    outcome = compared(tmp_path, name)
    assert outcome.equal and outcome.check.photos + len(outcome.unreadable) == outcome.total > 120
    assert len(outcome.unreadable) > 20
    for failure in outcome.unreadable:
        assert cases.get(failure.path, "bad") == "bad" and failure.stock and failure.fast


@pytest.mark.parametrize("name", [*NAMED, "own"])
def test_other_pixels_of_one_file_are_found_and_named(tree: Path, name: str, monkeypatch: Any) -> None:
    darken(monkeypatch, tree / "class_001" / "0001.jpg")
    outcome = compared(tree, SMALL if name == "own" else name)
    assert not outcome.equal and outcome.check.photos_differing == 1
    (worst,) = outcome.check.worst
    assert (worst.index, worst.path) == (4, str(tree / "class_001" / "0001.jpg"))
    largest = pytest.approx(3 / 255, rel=0.01) if name == "own" else 3
    assert worst.largest == outcome.check.largest == largest and outcome.check.bytes_only == (name != "own")
    assert 0 < outcome.check.over_one <= outcome.check.differing < outcome.check.values or name == "own"


def test_training_compares_augmented_images_of_the_seed(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    real = transforms.functional.resized_crop
    crop: Any = lambda *some, **more: seen.append(some[1:5]) or real(*some, **more)  # noqa: E731
    monkeypatch.setattr(transforms.functional, "resized_crop", crop)
    assert compared(tree, "train").equal and len(set(seen)) == 6  # each image has a crop of its own
    first, seen[:] = set(seen), []
    assert compared(tree, "train", seed=1).equal and not set(seen) & first


@pytest.mark.parametrize("fails", ["fast", "stock", "both"])
def test_a_failure_of_one_loader_only_is_a_difference(tree: Path, fails: str, monkeypatch: Any) -> None:
    path = tree / "class_001" / "0000.jpg"
    place, name = (ImageReader, "open") if fails == "fast" else (ImageFolder, "__getitem__")
    real, argument = getattr(place, name), path.read_bytes() if fails == "fast" else 3

    def call(self: Any, *arguments: Any) -> Any:
        if argument in arguments:
            raise OSError("no such pixels")
        return real(self, *arguments)

    if fails == "both":
        path.write_bytes(path.read_bytes()[:200])
    else:
        leave_to_python(monkeypatch, path)
        monkeypatch.setattr(place, name, call)
    outcome = compared(tree)
    assert outcome.equal == (fails == "both") and outcome.check.photos == 5
    (failure,) = outcome.unreadable if fails == "both" else outcome.one_sided
    assert (failure.index, failure.path) == (3, str(path))
    if fails == "both":
        assert failure.stock == failure.fast and "truncated" in str(failure.stock).lower()
    else:
        assert getattr(failure, fails) == "OSError: no such pixels"


def test_other_labels_are_found(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Reversed(FastImageFolder):
        def find_classes(self, directory: Any) -> tuple[list[str], dict[str, int]]:
            classes = super().find_classes(directory)[0][::-1]
            return classes, {name: number for number, name in enumerate(classes)}

    with monkeypatch.context() as patch:
        patch.setattr(fastpipe, "FastImageFolder", Reversed)
        outcome = compared(tree)
    assert not outcome.equal and outcome.seen == 0
    assert set(outcome.index_problems) == {"classes", "class_to_idx", "samples", "targets"}
    assert "expected 'class_000'" in outcome.index_problems["classes"]
    real = Items.targets

    def targets(self: Items, numbers: Sequence[int]) -> list[Any]:
        positions = self.positions[list(numbers)].tolist()
        return [int(target) + (at == 5) for target, at in zip(real(self, numbers), positions, strict=True)]

    monkeypatch.setattr(Items, "targets", targets)
    outcome = compared(tree)
    assert not outcome.equal
    assert [(one.index, one.note) for one in outcome.check.worst] == [(5, "label 2 instead of 1")]


@pytest.mark.parametrize(
    ("transform", "error", "message"),
    [
        (SMALL, None, ""), (lambda image: image.resize((9, 8)), None, ""),
        (lambda image: {"image": transforms.functional.to_tensor(image), "width": image.width}, None, ""),
        (transforms.Compose([transforms.RandomCrop(30), transforms.ToTensor(), lambda one: one * 2]), None, ""),
        (lambda image: image.rotate(random.random() * 90), OptionError, AGAIN),
        (lambda image: SMALL(image) + torch.rand(()), OptionError, AGAIN),
        (lambda image: {}["size"], OptionError, r"fails on all: .*0000\.jpg': KeyError: 'size'"),
        (lambda image: [0] * 2**62, MemoryError, None),
    ],
)  # fmt: skip
def test_own_transforms_are_compared_or_refused(tree: Path, transform: Any, error: Any, message: str) -> None:
    if error is None:
        assert compared(tree, transform).equal
    else:
        with pytest.raises(error, match=message):
            compared(tree, transform)


PIXELS = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
ZEROS, OBJECT = torch.zeros(3, 2, 2), object()


def test_values_of_every_kind_show_their_difference() -> None:
    kinds: list[Callable[[Any], Any]] = [
        lambda n: torch.full((2, 3), n), lambda n: torch.full((2, 3), n, dtype=torch.bfloat16),
        lambda n: torch.full((2, 3), float(n), requires_grad=True),
        lambda n: tv_tensors.Image(torch.full((3, 2, 2), n, dtype=torch.uint8)),
        lambda n: Image.fromarray(PIXELS + np.uint8(n)), lambda n: np.full(3, n, np.float16), np.float32, int,
        float, bool, lambda n: ([ZEROS], (n,)),
        lambda n: {"image": torch.full((2,), n), "name": "text", "nothing": None},
    ]  # fmt: skip
    for make in kinds:
        assert all(np.array_equal(*pair) for pair in array_pairs(make(0), make(0))), make(0)
        assert not all(np.array_equal(*pair) for pair in array_pairs(make(0), make(1))), make(0)


@pytest.mark.parametrize(
    ("expected", "got", "error", "message"),
    [
        (torch.zeros(2), torch.zeros(3), UnlikeError,
         r"tensor torch.float32 \(3,\) instead of torch.float32 \(2,\)"),
        (torch.zeros(2), torch.zeros(2, dtype=torch.uint8), UnlikeError, "uint8"),
        (torch.zeros(2), np.zeros(2), UnlikeError, "a ndarray instead of a Tensor"),
        (ZEROS, tv_tensors.Image(ZEROS), UnlikeError, "a Image instead of a Tensor"),
        (np.zeros(2), np.zeros(2, np.float32), UnlikeError, "array float32"),
        (Image.new("RGB", (2, 3)), Image.new("L", (2, 3)), UnlikeError, "PIL image L"),
        (Image.new("L", (2, 3)), Image.new("L", (3, 2)), UnlikeError, r"\(3, 2\)"),
        ([1], [1, 2], UnlikeError, "length 2 instead of 1"), ({"a": 1}, {"b": 1}, UnlikeError, "keys"),
        ("a", "b", UnlikeError, "'b' instead of 'a'"), (None, 1, UnlikeError, "a int instead of a NoneType"),
        *((one, one, OptionError, "cannot be compared; let it give")
          for one in (OBJECT, np.array(["text"]), np.array([OBJECT]))),
    ],
)  # fmt: skip
def test_values_that_cannot_be_compared_are_errors(expected: Any, got: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        list(array_pairs(expected, got))


MODULE = """
import os, signal
from functools import partial
from torchvision import transforms

ready = transforms.Compose([transforms.Resize(32), transforms.CenterCrop(32), transforms.ToTensor()])
make, make_sized, make_nothing = lambda: ready, lambda side=32: transforms.CenterCrop(side), lambda: None
plain = lambda image: image.rotate(90)
rotate, number, calls = partial(plain), 3, []

def breaks():
    raise KeyError("size")

class Needs:
    def __init__(self, size): pass
    def __call__(self, image): return image

class Own(Needs):
    size = 7
    def __init__(self): pass

def interrupts(image):
    calls.append(1)
    if len(calls) == 3:
        os.kill(os.getpid(), signal.SIGINT)
    return image
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of the user's, in the present folder."""
    (tmp_path / "mine.py").write_text(MODULE)
    (tmp_path / "broken.py").write_text("import no_such_package_at_all")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("mine", "broken"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.usefixtures("module")
def test_a_transform_is_named_or_made_by_code_of_the_user() -> None:
    for name in NAMED:
        chain = chain_of(name)
        assert callable(chain.transform) and (chain.name, chain.is_own) == (name, False)
    for attribute, kind in {
        "ready": "Compose", "make": "Compose", "make_sized": "CenterCrop", "plain": "function",
        "rotate": "partial", "Own": "Own", "transforms.ToTensor": "ToTensor",
    }.items():  # fmt: skip
        chain = chain_of(f"mine:{attribute}")
        assert type(chain.transform).__name__ == kind and chain.is_own and len(chain.about) <= 200


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mine:none", "'mine' has no 'none'"), ("mine:Own.none", "has no 'Own.none'"),
        ("mine:number", "is a int; name a transform"), ("mine:Needs", "class that needs arguments"),
        ("mine:make_nothing", "is a NoneType"), ("mine:breaks", "calling it failed: KeyError: 'size'"),
        ("no_such_module:name", "importing 'no_such_module' failed: ModuleNotFoundError"),
        ("broken:name", "No module named 'no_such_package_at_all'"),
        *((name, "must be eval, train, none or module:name") for name in ("evaluation", "", ":", "a:", ":a")),
    ],
)  # fmt: skip
def test_names_of_no_transform_are_refused(name: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        chain_of(name)


FOLDER = Path("/data/photos")
CHAIN = Chain("eval", "Resize(256)", None, 32)


def path_of(index: int) -> str:
    return str(FOLDER / f"{index}.jpg")


def check_of(*gaps: float, kind: type = np.uint8) -> Check:
    """One image of 100 values for each gap, which is that of its first value."""
    check = Check()
    for index, gap in enumerate(gaps):
        expected, got = np.full(100, 9, kind), np.full(100, 9, kind)
        got[0] += kind(gap)
        check.add([(expected, got)], index, path_of(index))
    return check


def outcome_of(*gaps: float, kind: type = np.uint8, check: Check | None = None, **more: Any) -> Outcome:
    return Outcome(10, 2, 7, check=check or check_of(*gaps or (0, 0), kind=kind), **more)


def failures(count: int, stock: Any = "OSError: no", fast: Any = "OSError: no") -> list[Failure]:
    return [Failure(index, path_of(index), stock, fast) for index in range(count)]


def printed(outcome: Outcome, **options: Any) -> str:
    text = io.StringIO()
    print_outcome(outcome, CHAIN, FOLDER, Console(file=text, width=60, **options))
    return text.getvalue()


def test_the_last_line_is_the_verdict() -> None:
    for outcome, text in (
        (outcome_of(), "Equal: FastImageFolder and ImageFolder agree, to the last bit, for 2 images."),
        (outcome_of(unreadable=failures(1)), "to the last bit, for 2 images. 1 file can be read by neither."),
        (outcome_of(0, 3), "Different: 1 of 2 images differs by up to 3 of 255."),
        (outcome_of(1, 1), "2 of 2 images differ by up to 1 of 255, as if rounded in another way."),
        (outcome_of(0, 0.5, kind=np.float32), "Different: 1 of 2 images differs by up to 0.5."),
        (outcome_of(one_sided=failures(2, None)), "Different: 2 images fail with one of the two only."),
        (outcome_of(index_problems={"classes": "no"}), "the same samples, so no image was compared."),
    ):
        assert sentence(outcome).endswith(text) and printed(outcome).splitlines()[-1] == sentence(outcome)


def test_the_output_has_figures_and_the_worst_files() -> None:
    text = printed(outcome_of(0, 1, 2, 3, 4, 5, 6, 0))
    lines = [line.split("  ", 1) for line in text.splitlines()[:10]]
    figures = {name: value.strip() for name, value in lines}
    assert {"images": "7 of 10 in 2 classes", "values equal": "99.250000%", "off by more than 1": "0.625000%",
            "largest difference": "6 of 255"}.items() <= figures.items()  # fmt: skip
    assert "Images that differ (5 of 6), the worst first\n  6.jpg (sample 6): 6 of 255\n" in text
    assert "1.jpg" not in text and "\x1b" not in text and "\x1b" in printed(outcome_of(), force_terminal=True)
    check = check_of(0, 200)
    check.add_unlike("tensor (1,) instead of (2,)", 7, str(FOLDER / ("[red]:x:" * 20 + ".jpg")))
    unlike = f"{'[red]:x:' * 20}.jpg (sample 7): tensor (1,) instead of (2,)"
    assert f"first\n  {unlike}\n  1.jpg (sample 1): 200 of 255\n" in printed(outcome_of(check=check))
    text = printed(outcome_of(unreadable=failures(7), one_sided=failures(1, "OSError: a", None)))
    assert "Files that fail with one of the two only\n  0.jpg (sample 0): ImageFolder: OSError: a\n" in text
    assert "Files that neither can read (5 of 7)\n  0.jpg (sample 0): OSError: no\n" in text
    assert "4.jpg" in text and "5.jpg" not in text
    text = printed(outcome_of(index_problems={"classes": "FastImageFolder.classes is …"}))
    assert "class_to_idx, samples, targets equal" in text and "largest difference" not in text
    assert "Not equal\n  FastImageFolder.classes is …\n" in text


def test_the_json_has_everything_and_no_infinity() -> None:
    check = check_of(0, 3)
    check.add_unlike("label 1 instead of 0", 5, path_of(5))
    outcome = outcome_of(check=check, unreadable=failures(7), one_sided=failures(1, None))
    made = content(outcome, CHAIN, FOLDER, 4)
    assert json.loads(json.dumps(made, allow_nan=False)) == made
    assert (made["schema"], made["equal"], made["seed"], made["classes"]) == (1, False, 4, 2)
    assert made["images"] == {"total": 10, "chosen": 7, "cached": None, "compared": 3, "differing": 2}
    assert made["values"] == {"compared": 200, "differing": 1, "over_one": 1, "largest": 3, "unit": "of 255"}
    assert [(one["index"], one["largest"], one["note"]) for one in made["worst"]] == [
        (5, None, "label 1 instead of 0"), (1, 3, "")
    ]  # fmt: skip
    assert made["unreadable"]["count"] == len(made["unreadable"]["files"]) == 7
    assert made["one_sided"]["files"][0]["torchvision"] is None
    assert made["index"] == dict.fromkeys(("classes", "class_to_idx", "samples", "targets"), "equal")
    outcome = outcome_of(0, float("nan"), kind=np.float32)
    made = content(outcome, CHAIN, FOLDER, 0)
    json.dumps(made, allow_nan=False)
    assert (made["values"]["largest"], made["values"]["unit"]) == (None, "absolute")
    assert "inf" in sentence(outcome)
    for index in range(1500):  # of very many failures only the number is kept
        _add(outcome, path_of(index), index, _Try(error="OSError: no"), _Try(error="OSError: no"))
    unreadable = content(outcome, CHAIN, FOLDER, 0)["unreadable"]
    assert (unreadable["count"], len(unreadable["files"])) == (1500, 1000)
    assert len(set(map(id, outcome.unreadable))) == 1001


def test_the_command_reports_equal_and_different_folders(tree: Path, command: Any, monkeypatch: Any) -> None:
    file = tree.parent / "new" / "outcome.json"
    code, output, errors = command("verify", tree, "--json", file)
    assert code == 0 and output.splitlines()[-1].endswith("to the last bit, for 6 images.")
    written = json.loads(file.read_text())
    assert errors == f"wrote {file}\n" and written["equal"] is True
    assert "CenterCrop" in written["plan"] and "torchvision" in written["versions"]
    for value, count in (("4", "4 of 6"), ("all", "6"), ("0", "6"), ("99", "6")):
        assert f"{count} in 2 classes\n" in command("verify", tree, "--images", value)[1]
    tree = shutil.copytree(tree, tree.with_name("other"))  # of which no decoded pixels are kept
    darken(monkeypatch, tree / "class_001" / "0002.jpg")
    code, output, _ = command("verify", tree)
    assert code == 1 and f"  {Path('class_001', '0002.jpg')} (sample 5): 3 of 255" in output
    (tree / "class_000" / "0001.jpg").write_bytes(b"no image")
    code, output, errors = command("verify", tree, "--transform", "none")
    assert "1 file that neither can read" in output and errors == ""
    assert f"  {Path('class_000', '0001.jpg')} (sample 1): UnidentifiedImageError: cannot" in output


def test_images_of_a_cache_are_compared(
    tree: Path, tmp_path: Path, command: Any, settled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pixels that were kept wrongly are found."""
    settled(tree)
    folder = tmp_path / "cache"
    assert command("verify", tree, "--cache", folder)[0] == 2, "there is none yet"
    keep = ImageCache.keep
    for number, is_spoilt in enumerate((False, True)):
        with monkeypatch.context() as patch:
            if is_spoilt:
                patch.setattr(
                    ImageCache, "keep", lambda self, file, pixels, *more: keep(self, file, pixels ^ 1, *more)
                )
            place = folder / str(number)
            dataset = FastImageFolder(tree, SMALL, cache=Cache("disk", dir=place, form="pixels"))
            assert len(list(dataset)) == 6
            dataset.close()
        code, output, _ = command("verify", tree, "--cache", place)
        assert code == is_spoilt and ("6 of 6 images differ" in output) == is_spoilt
        assert "from the cache          6 of 6" in output


def test_a_cache_of_other_images_is_no_success(
    tree: Path, tmp_path: Path, command: Any, settled: Any
) -> None:
    settled(tree)
    shutil.copytree(tree, tmp_path / "copy")
    settled(tmp_path / "copy")
    dataset = FastImageFolder(tmp_path / "copy", SMALL, cache=Cache("disk", dir=tmp_path / "kept"))
    assert len(list(dataset)) == 6
    dataset.close()
    before = sum(file.stat().st_blocks for file in (tmp_path / "kept").rglob("*"))
    code, _, errors = command("verify", tree, "--cache", tmp_path / "kept")
    assert code == 2 and "none of the 6 images is in the cache" in errors
    assert sum(file.stat().st_blocks for file in (tmp_path / "kept").rglob("*")) == before


def test_wrong_arguments_are_refused(tree: Path, tmp_path: Path, command: Any) -> None:
    for name in ("empty/inner", "broken/inner"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "broken" / "inner" / "a.jpg").write_bytes(b"")
    for arguments, message in (
        ((tmp_path / "none",), "is not a folder; give one with a sub-folder per class"),
        ((tree / "class_000",), "has no class folders"),
        ((tmp_path / "empty",), "no valid file for the classes inner"),
        ((tmp_path / "broken",), "none of the 1 images can be read"),
        ((tree, "--transform", "evaluation"), "must be eval, train, none"),
    ):
        code, output, errors = command("verify", *arguments)
        assert (code, output) == (2, "") and errors.startswith("fastpipe verify: ") and message in errors
    for options in (["--images", "few"], ["--images", "-3"], ["--seed", "-1"], ["--seed", "x"], ["--json"]):
        with pytest.raises(SystemExit) as stopped:
            command("verify", tree, *options)
        assert stopped.value.code == 2


@pytest.mark.usefixtures("module")
def test_ctrl_c_ends_the_command(tree: Path, tmp_path: Path, command: Any) -> None:
    """In a transform that is the user's own."""
    file = tmp_path / "outcome.json"
    code = command("verify", tree, "--transform", "mine:interrupts", "--json", file)
    assert code == (130, "", "fastpipe verify: interrupted\n") and not file.exists()
