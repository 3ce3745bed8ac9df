"""Batches that DALI decodes, beside those of the other decoders: the same to the last bit, whatever the files."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from odd_images import damaged_at_random
from PIL import Image
from torch.utils.data import ConcatDataset, DataLoader, Subset
from torchvision import transforms as v1

from fastpipe import Decode, FastImageFolder, FastLoader
from fastpipe.bench.synthetic import photo_tree
from fastpipe.core.types import Box, Key
from fastpipe.errors import BadSampleError
from fastpipe.images.dali import DaliDecoder
from fastpipe.torch.randomness import keyed

TRAINING = v1.Compose([
    v1.RandomResizedCrop(48), v1.RandomHorizontalFlip(), v1.ToTensor(), v1.Normalize((0.5,) * 3, (0.2,) * 3)
])  # fmt: skip


def pair(root: Path, transform: Any = TRAINING, **options: Any) -> tuple[FastImageFolder, FastImageFolder]:
    """A folder decoded by DALI, and one decoded by threads."""
    made = [
        FastImageFolder(root, transform, decode=Decode(backend=backend), cache="off", **options)
        for backend in ("dali", "auto")
    ]
    return made[0], made[1]


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tree of photographs of which many are damaged in their coded data, some so that they are errors."""
    root = tmp_path_factory.mktemp("damaged")
    photo = Image.open(next(photo_tree(root / "photos", classes=1, per_class=1).rglob("*.jp*g")))
    photo = photo.convert("RGB").resize((150, 120))
    rng = np.random.default_rng(7)
    for number in range(80):
        folder = root / "tree" / f"class{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{number:02}.jpg"
        photo.save(path, quality=85, progressive=number % 3 == 0, subsampling=("4:4:4", "4:2:0")[number % 2])
        if number % 5 < 2:
            path.write_bytes(damaged_at_random(path.read_bytes(), rng))
    return root / "tree"


@pytest.mark.parametrize(
    "transform",
    [
        TRAINING,
        v1.Compose([v1.Resize(40), v1.CenterCrop(32), v1.PILToTensor()]),
        v1.Compose([v1.CenterCrop(900), v1.Resize(50), v1.ToTensor()]),
        v1.Compose([v1.Pad(9), v1.RandomCrop(64), v1.Grayscale(3), v1.ToTensor()]),
        v1.Compose([v1.RandomResizedCrop(32, interpolation=v1.InterpolationMode.NEAREST), v1.ToTensor()]),
        v1.Compose([v1.RandomCrop((40, 1)), v1.ToTensor()]),
        v1.Compose([v1.RandomResizedCrop(32), v1.RandomRotation(10), v1.ToTensor()]),
        v1.ToTensor(),
        None,
    ],
    ids=[
        "training",
        "evaluation",
        "filled",
        "padded, grey",
        "nearest",
        "a column",
        "rotation",
        "whole",
        "none",
    ],
)
def test_samples_are_the_same(photos: Path, transform: Any) -> None:
    dali, auto = pair(photos, transform)
    indices = list(range(0, len(auto), max(1, len(auto) // 24)))
    key = Key(5, 1, np.arange(len(indices)))
    with keyed(key):
        made = dali.__getitems__(indices)
    with keyed(key):
        expected = auto.__getitems__(indices)
    for (one, one_target), (other, other_target) in zip(made, expected, strict=True):
        assert type(one) is type(other) and one_target == other_target
        if isinstance(other, torch.Tensor):
            assert torch.equal(one, other)
        else:
            assert one.tobytes() == other.tobytes() and one.info == other.info


@pytest.mark.parametrize("scaled", [{"scaled": True}, {"short_side": 60}], ids=str)
def test_options_that_change_pixels_change_them_alike(photos: Path, scaled: dict[str, Any]) -> None:
    made, expected = (
        FastImageFolder(
            photos, v1.Compose([v1.Resize(20), v1.CenterCrop(16), v1.ToTensor()]), cache="off",
            decode=Decode(backend=backend, **scaled),
        ).__getitems__(range(8))
        for backend in ("dali", "auto")
    )  # fmt: skip
    assert all(torch.equal(one[0], other[0]) for one, other in zip(made, expected, strict=True))


def test_damaged_files_are_left_out_alike_and_the_rest_is_the_same(damaged: Path) -> None:
    dali, auto = pair(damaged, bad_samples="skip", seed=3)
    epochs = [
        [list(FastLoader(folder, batch_size=16, shuffle=True)) for _ in range(2)] for folder in (dali, auto)
    ]
    for made, expected in zip(*epochs, strict=True):
        assert sum(len(images) for images, _ in expected) < 80
        for one, other in zip(made, expected, strict=True):
            assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])


@pytest.mark.parametrize("policy", ["raise", "replace"])
def test_policies_work_alike(damaged: Path, policy: Any) -> None:
    found: list[list[Any]] = []
    for folder in pair(damaged, bad_samples=policy, seed=3):
        outcomes: list[Any] = []
        batches = iter(FastLoader(folder, batch_size=16, shuffle=True))
        for _ in range(5):
            try:
                outcomes.append(next(batches))
            except BadSampleError as error:
                outcomes.append((error.index, error.path, type(error.__cause__)))
        found.append(outcomes)
    assert any(isinstance(outcome, tuple) for outcome in found[1]) == (policy == "raise")
    for one, other in zip(*found, strict=True):
        if isinstance(other, tuple):
            assert one == other
        else:
            assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])


def test_a_file_that_is_declined_costs_one_pipeline_and_is_not_tried_again(damaged: Path) -> None:
    good = [path.read_bytes() for path in sorted(damaged.rglob("*.jpg"))[-3:]]
    bad = good[0][: len(good[0]) // 2]  # its header is that of a good one
    decoder, made = DaliDecoder(1), []
    make = decoder._new_pipeline
    decoder._new_pipeline = lambda: made.append(1) or make()  # type: ignore[method-assign, func-returns-value]
    box = Box(0, 0, 120, 150)
    parts = [(good[1], box), (bad, box), (good[2], box)]
    first = decoder.decode(parts)
    count = len(made)
    second = decoder.decode(parts)
    for images in (first, second):
        assert images[1] is None and images[0] is not None and images[2] is not None
        assert images[0].shape == (120, 150, 3)
    assert len(made) <= count + 1, "the pipeline was made anew once more at most"
    decoder.decode(parts)
    assert len(made) <= count + 1


def test_what_was_decoded_stays_as_it_is(photos: Path) -> None:
    blobs = [path.read_bytes() for path in sorted(photos.rglob("*.jp*g"))[:6]]
    decoder = DaliDecoder(2)
    first = decoder.decode([(blob, Box(0, 0, 40, 30)) for blob in blobs])
    copies = [None if image is None else image.copy() for image in first]
    for _ in range(4):
        decoder.decode([(blob, Box(8, 8, 40, 30)) for blob in reversed(blobs)])
    for image, copy in zip(first, copies, strict=True):
        assert image is not None and copy is not None and np.array_equal(image, copy)


@pytest.mark.slow
def test_behind_wrappers_workers_and_torchs_loader(photos: Path) -> None:
    dali, auto = pair(photos, seed=1)
    fork: Any = {"num_workers": 2, "multiprocessing_context": "fork"}
    for make in (
        lambda folder: FastLoader(Subset(folder, range(0, 20, 2)), batch_size=4),
        lambda folder: FastLoader(ConcatDataset([folder, folder]), batch_size=5, shuffle=True),
        lambda folder: FastLoader(folder, batch_size=4, shuffle=True, **fork),  # of one that has used it
        lambda folder: FastLoader(
            folder,
            batch_size=4,
            shuffle=True,
            num_workers=2,
            workers="processes",
            multiprocessing_context="forkserver",
        ),
    ):
        for one, other in zip(make(dali), make(auto), strict=True):
            assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])
    torch.manual_seed(0)
    made = list(DataLoader(dali, batch_size=4, num_workers=2))
    torch.manual_seed(0)
    expected = list(DataLoader(auto, batch_size=4, num_workers=2))
    for one, other in zip(made, expected, strict=True):
        assert torch.equal(one[0], other[0])


def test_an_epoch_that_was_left_goes_on(photos: Path) -> None:
    dali, auto = pair(photos, seed=1)
    whole = list(FastLoader(auto, batch_size=4, shuffle=True))
    loader = FastLoader(dali, batch_size=4, shuffle=True)
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    again = FastLoader(dali, batch_size=4, shuffle=True)
    again.load_state_dict(state)
    rest = list(again)
    assert len(rest) == len(whole) - 1
    assert all(torch.equal(one[0], other[0]) for one, other in zip(rest, whole[1:], strict=True))


def test_the_plan_and_options_say_who_decodes(photos: Path) -> None:
    dali, auto = pair(photos)
    assert "the JPEGs of a batch  →  DALI" in repr(dali.plan) and "DALI" not in repr(auto.plan)
    assert "Decode(backend='dali')" in repr(dali)


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["os.kill(os.getpid(), 9)", "batches = iter(loader); next(batches)"])
def test_processes_end(photos: Path, ends: str) -> None:
    script = f"""
import os, sys, torch
from torchvision import transforms as v1
from fastpipe import Decode, FastImageFolder, FastLoader
transform = v1.Compose([v1.RandomResizedCrop(32), v1.ToTensor()])
loader = FastLoader(FastImageFolder(sys.argv[1], transform, decode=Decode(backend="dali")), batch_size=4)
assert sum(len(images) for images, _ in loader) == len(loader.dataset)
{ends}
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(photos)], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == (-9 if "kill" in ends else 0), done.stderr
    assert done.stderr == ""


_BUSY = """
import os, sys, threading
from fastpipe import FastImageFolder, FastLoader, Decode
from fastpipe.images.dali import DaliDecoder
from torchvision import transforms as v1
inside, run = threading.Event(), DaliDecoder._run
def told(self, *arguments):
    inside.set()
    return run(self, *arguments)
transform = v1.Compose([v1.Resize(32), v1.CenterCrop(32), v1.ToTensor()])
loader = FastLoader(FastImageFolder(sys.argv[1], transform, decode=Decode(backend="dali")), batch_size=2)
batches = iter(loader)
next(batches)
DaliDecoder._run = told
inside.wait()
"""


def said_by(code: str, root: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, str(root)], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
def test_an_interpreter_ends_while_a_batch_is_decoded(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (2000, 3000, 3), np.uint8)
    (tmp_path / "a").mkdir()
    for number in range(12):  # of a third of a second each
        Image.fromarray(noise).save(tmp_path / "a" / f"{number}.jpg")
    assert said_by(_BUSY, tmp_path) == ""


@pytest.mark.slow
def test_a_forked_child_ends_and_its_parent_goes_on(photos: Path) -> None:
    code = """
import os, sys
from fastpipe import FastImageFolder, FastLoader, Decode
from torchvision import transforms as v1
transform = v1.Compose([v1.Resize(32), v1.CenterCrop(32), v1.ToTensor()])
loader = FastLoader(FastImageFolder(sys.argv[1], transform, decode=Decode(backend="dali")), batch_size=4)
batches = iter(loader)
next(batches)
child = os.fork()
if not child:
    sys.exit(len(list(FastLoader(loader.dataset, batch_size=4))))
count = 1 + sum(1 for _ in batches)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == count == len(loader)
"""
    said = said_by(code, photos)
    assert "Exception" not in said and "Traceback" not in said, said


_WHILE_MADE = """
import os, sys, threading
import nvidia.dali
from fastpipe import FastImageFolder, FastLoader, Decode
from torchvision import transforms as v1
made, forked, make = threading.Event(), threading.Event(), nvidia.dali.Pipeline
def slow(*arguments, **options):
    made.set()
    forked.wait()
    return make(*arguments, **options)
nvidia.dali.Pipeline = slow
transform = v1.Compose([v1.Resize(32), v1.CenterCrop(32), v1.ToTensor()])
one, other = (
    FastLoader(FastImageFolder(sys.argv[1], transform, decode=Decode(backend="dali")), batch_size=4)
    for _ in range(2)
)
thread = threading.Thread(target=list, args=(one,))
thread.start()
made.wait()
child = os.fork()
if not child:
    os._exit(len(list(other)))
forked.set()
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == len(one)
thread.join()
"""


@pytest.mark.slow
def test_a_child_that_is_forked_while_the_first_pipeline_is_made_decodes_without_dali(photos: Path) -> None:
    said = said_by(_WHILE_MADE, photos)
    assert said.count("does not work in a process that was forked") == 1 == said.count("\n"), said


@pytest.mark.slow
def test_libjpeg_does_not_talk_about_damage(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for number in range(8):
        file = io.BytesIO()
        Image.fromarray(np.random.default_rng(number).integers(0, 255, (64, 64, 3), np.uint8)).save(
            file, "JPEG"
        )
        damaged = bytearray(file.getvalue())
        damaged[-900:-880] = bytes(20)
        (tmp_path / "a" / f"{number}.jpg").write_bytes(damaged)
    code = """
import sys
from fastpipe import FastImageFolder, FastLoader, Decode
folder = FastImageFolder(sys.argv[1], decode=Decode(backend="dali"), cache="off", bad_samples="skip")
for _ in range(2):
    assert len(list(FastLoader(folder, batch_size=4, collate_fn=list))) == 2
"""
    assert said_by(code, tmp_path) == ""


def test_a_decoder_that_is_closed_declines(photos: Path) -> None:
    blob = next(photos.rglob("*.jp*g")).read_bytes()
    decoder = DaliDecoder(1)
    part = (blob, Box(0, 0, 8, 8))
    assert decoder.decode([part])[0] is not None
    decoder.close()
    decoder.close()
    assert decoder.decode([part]) == [None] and decoder._pipeline is None


def test_where_parts_are_not_to_be_decoded_they_are_cut_from_whole_images(photos: Path) -> None:
    files = [path.read_bytes() for path in sorted(photos.rglob("*.jp*g"))[:6]]
    parts = []
    for number, file in enumerate(files):
        height, width = np.asarray(Image.open(io.BytesIO(file))).shape[:2]
        parts.append((file, Box(number * 5, number * 7, height // 2, width - number * 9)))
    by_region, whole = DaliDecoder(2), DaliDecoder(2)
    whole._by_region = False
    assert "whole images" in whole.describe() and "only the region" in by_region.describe()
    for image, other, (file, box) in zip(whole.decode(parts), by_region.decode(parts), parts, strict=True):
        expected = np.asarray(Image.open(io.BytesIO(file)).convert("RGB"))
        np.testing.assert_array_equal(image, other)
        np.testing.assert_array_equal(
            image, expected[box.top : box.top + box.height, box.left : box.left + box.width]
        )
    outside = parts[0][1]._replace(height=1 << 14)
    assert whole.decode([(files[0], outside), parts[1]])[0] is None


def test_it_is_given_up_where_it_fails_for_everything(
    photos: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[int] = []

    def fails(self: DaliDecoder, parts: Any, stream: Any) -> Any:
        calls.append(len(parts))
        raise RuntimeError("the driver is too old")

    monkeypatch.setattr(DaliDecoder, "_run", fails)
    fast, slow = pair(photos, seed=3)
    batches = [list(FastLoader(Subset(one, range(24)), batch_size=12, shuffle=True)) for one in (fast, slow)]
    for one, other in zip(*batches, strict=True):
        assert torch.equal(one[0], other[0])
    assert sum(size == 1 for size in calls) == 8 and len(calls) < 32
    told = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(told) == 1 and "DALI has failed for 8 images one after the other" in told[0]
    assert "the driver is too old" in told[0]
