"""Batches that DALI decodes, beside those of the other decoders: the same to the last bit, whatever the files."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from odd_images import damaged_at_random
from PIL import Image
from same import same
from scripts import ran
from streams import outcomes, stream
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
    scaled = {name: options.pop(name) for name in ("scaled", "short_side") if name in options}
    backends: list[Any] = ["dali", "auto"]
    decodes = [Decode(backend=backend, **scaled) for backend in backends]
    dali, auto = (FastImageFolder(root, transform, decode=one, cache="off", **options) for one in decodes)
    return dali, auto


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


SMALL = v1.Compose([v1.Resize(20), v1.CenterCrop(16), v1.ToTensor()])
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "training": (TRAINING, {}),
    "evaluation": (v1.Compose([v1.Resize(40), v1.CenterCrop(32), v1.PILToTensor()]), {}),
    "filled": (v1.Compose([v1.CenterCrop(900), v1.Resize(50), v1.ToTensor()]), {}),
    "padded, grey": (v1.Compose([v1.Pad(9), v1.RandomCrop(64), v1.Grayscale(3), v1.ToTensor()]), {}),
    "nearest": (v1.Compose([v1.RandomResizedCrop(32, interpolation=v1.InterpolationMode.NEAREST), v1.ToTensor()]), {}),
    "a column": (v1.Compose([v1.RandomCrop((40, 1)), v1.ToTensor()]), {}),
    "rotation": (v1.Compose([v1.RandomResizedCrop(32), v1.RandomRotation(10), v1.ToTensor()]), {}),
    "whole": (v1.ToTensor(), {}),
    "none": (None, {}),
    "scaled": (SMALL, {"scaled": True}),
    "short side": (SMALL, {"short_side": 60}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_samples_are_the_same(photos: Path, name: str) -> None:
    transform, options = CASES[name]
    dali, auto = pair(photos, transform, **options)
    indices = list(range(0, len(auto), max(1, len(auto) // 24)))
    key = Key(5, 1, np.arange(len(indices)))
    with keyed(key):
        made = dali.__getitems__(indices)
    with keyed(key):
        expected = auto.__getitems__(indices)
    assert same(made, expected)


@pytest.mark.parametrize("policy", ["raise", "skip", "replace"])
def test_policies_work_alike(damaged: Path, policy: Any) -> None:
    found = []
    for folder in pair(damaged, bad_samples=policy, seed=3):
        loader = FastLoader(folder, batch_size=16, shuffle=True)
        found.append([one for _ in range(2) for one in outcomes(loader)])
    errors = [error for error in found[1] if isinstance(error, BadSampleError)]
    assert bool(errors) == (policy == "raise")
    assert policy != "skip" or sum(batch[1][1][0] for batch in found[1]) < 2 * 80
    for one, other in zip(*found, strict=True):
        if isinstance(other, BadSampleError):
            assert (one.index, one.path, str(one)) == (other.index, other.path, str(other))
        else:
            assert one == other


def test_a_file_that_is_declined_costs_one_pipeline_and_is_not_tried_again(damaged: Path) -> None:
    good = [path.read_bytes() for path in sorted(damaged.rglob("*.jpg"))[-3:]]
    bad = good[0][: len(good[0]) // 2]  # its header is that of a good one
    decoder, made = DaliDecoder(1), []
    make = decoder._new_pipeline
    decoder._new_pipeline = lambda: made.append(1) or make()  # type: ignore[method-assign, func-returns-value]
    box = Box(0, 0, 120, 150)
    parts = [(good[1], box), (bad, box), (good[2], box)]
    counts = []
    for _ in range(3):
        images = decoder.decode(parts)
        assert images[1] is None and images[0] is not None and images[2] is not None
        assert images[0].shape == (120, 150, 3)
        counts.append(len(made))
    assert counts[2] <= counts[0] + 1, "the pipeline was made anew once more at most"


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
    server: Any = {"num_workers": 2, "multiprocessing_context": "forkserver", "workers": "processes"}
    for make in (
        lambda folder: FastLoader(Subset(folder, range(0, 20, 2)), batch_size=4),
        lambda folder: FastLoader(ConcatDataset([folder, folder]), batch_size=5, shuffle=True),
        lambda folder: FastLoader(folder, batch_size=4, shuffle=True, **fork),  # of one that has used it
        lambda folder: FastLoader(folder, batch_size=4, shuffle=True, **server),
        lambda folder: DataLoader(folder, batch_size=4, num_workers=2),
    ):
        assert stream(make(dali), seed=0) == stream(make(auto), seed=0)


def test_an_epoch_that_was_left_goes_on(photos: Path) -> None:
    dali, auto = pair(photos, seed=1)
    whole = stream(FastLoader(auto, batch_size=4, shuffle=True))
    loader, again = (FastLoader(dali, batch_size=4, shuffle=True) for _ in range(2))
    batches = iter(loader)
    next(batches)
    again.load_state_dict(loader.state_dict())
    assert stream(again) == whole[1:]


def test_the_plan_and_options_say_who_decodes(photos: Path) -> None:
    dali, auto = pair(photos)
    assert "the JPEGs of a batch  →  DALI" in repr(dali.plan) and "DALI" not in repr(auto.plan)
    assert "Decode(backend='dali')" in repr(dali)


_LOADER = """
import os, sys, threading
from fastpipe import FastImageFolder, FastLoader, Decode
from fastpipe.images.dali import DaliDecoder
from torchvision import transforms as v1
crop = v1.Compose([v1.Resize(32), v1.CenterCrop(32), v1.ToTensor()])
def loader(transform=crop, size=4, **options):
    folder = FastImageFolder(sys.argv[1], transform, decode=Decode(backend="dali"), **options)
    return FastLoader(folder, batch_size=size, collate_fn=None if transform else list)
"""


def said_by(code: str, root: Path, exit_code: int = 0) -> str:
    """Run a script that has the functions above, and return its output."""
    done = ran("-c", _LOADER + code, root)
    assert done.returncode == exit_code, done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "batches = iter(made); next(batches)"])
def test_processes_end(photos: Path, end: str) -> None:
    code = f"""
made = loader(v1.Compose([v1.RandomResizedCrop(32), v1.ToTensor()]))
assert sum(len(images) for images, _ in made) == len(made.dataset)
{end}
"""
    assert said_by(code, photos, -9 if "kill" in end else 0) == ""


_BUSY = """
inside, run = threading.Event(), DaliDecoder._run
def told(self, *arguments):
    inside.set()
    return run(self, *arguments)
batches = iter(loader(size=2))
next(batches)
DaliDecoder._run = told
inside.wait()
"""


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
made = loader()
batches = iter(made)
next(batches)
child = os.fork()
if not child:
    sys.exit(len(list(FastLoader(made.dataset, batch_size=4))))
count = 1 + sum(1 for _ in batches)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == count == len(made)
"""
    said = said_by(code, photos)
    assert "Exception" not in said and "Traceback" not in said, said


_WHILE_MADE = """
import nvidia.dali
made, forked, make = threading.Event(), threading.Event(), nvidia.dali.Pipeline
def slow(*arguments, **options):
    made.set()
    forked.wait()
    return make(*arguments, **options)
nvidia.dali.Pipeline = slow
one, other = loader(), loader()
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
        path = tmp_path / "a" / f"{number}.jpg"
        Image.fromarray(np.random.default_rng(number).integers(0, 255, (64, 64, 3), np.uint8)).save(path)
        damaged = bytearray(path.read_bytes())
        damaged[-900:-880] = bytes(20)
        path.write_bytes(damaged)
    code = """
made = loader(None, cache="off", bad_samples="skip")
for _ in range(2):
    assert len(list(made)) == 2
"""
    assert said_by(code, tmp_path) == ""


def test_a_decoder_that_is_closed_declines(photos: Path) -> None:
    decoder, part = DaliDecoder(1), (next(photos.rglob("*.jp*g")).read_bytes(), Box(0, 0, 8, 8))
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
    photos: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    calls: list[int] = []

    def fails(self: DaliDecoder, parts: Any, stream: Any) -> Any:
        calls.append(len(parts))
        raise RuntimeError("the driver is too old")

    monkeypatch.setattr(DaliDecoder, "_run", fails)
    fast, slow = pair(photos, seed=3)
    made, expected = (stream(FastLoader(Subset(one, range(24)), 12, shuffle=True)) for one in (fast, slow))
    assert made == expected
    assert sum(size == 1 for size in calls) == 8 and len(calls) < 32
    told = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(told) == 1 and "DALI has failed for 8 images one after the other" in told[0]
    assert "the driver is too old" in told[0]
