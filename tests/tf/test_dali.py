"""Batches that DALI decodes, beside those of the other decoders: the same to the last bit, whatever the files."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from odd_images import damaged_at_random, odd_images
from PIL import Image

from fastpipe import BadSamples, Cache, Decode, Shard
from fastpipe.errors import OptionError
from fastpipe.images.dali import DaliDecoder
from fastpipe.tf import image_dataset, image_stream

# Pillow warns of palettes with transparency and of truncated metadata, whoever asks it.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:PIL", "ignore:Palette images with Transparency")

Element = list[np.ndarray[Any, Any]]
Epoch = list[Element] | str


class Files:
    """A table of photographs, odd files and damaged ones, some of which cannot be read.

    Attributes:
        table: of them: their boxes are inside, those in the column "any" may reach outside.
    """

    def __init__(self, photos: list[str], folder: Path) -> None:
        rng = np.random.default_rng(3)
        odd = [str(case.path) for case in odd_images(folder / "odd") if case.expect == "ok"]
        damaged = []
        for number in range(24):
            path = folder / f"{number:02}.jpg"
            with Image.open(photos[number % len(photos)]) as photo:
                photo.convert("RGB").resize((90, 70)).save(path, quality=85, progressive=number % 3 == 0)
            path.write_bytes(damaged_at_random(path.read_bytes(), rng))
            damaged.append(str(path))
        files = [*photos[:16], *odd[::2], *damaged]
        files = [files[place] for place in rng.permutation(len(files))]
        self.table = {
            "file": files, "row": list(range(len(files))), "label": ["a", "b"] * (len(files) // 2),
            "box": [self._box(rng, path, 0) for path in files],
            "any": [self._box(rng, path, 9) for path in files],
        }  # fmt: skip

    @staticmethod
    def _box(rng: np.random.Generator, path: str, beyond: int) -> list[int]:
        with Image.open(path) as image:
            width, height = image.size
        left, right = sorted(rng.choice(width + 2 * beyond + 1, 2, replace=False).tolist())
        top, bottom = sorted(rng.choice(height + 2 * beyond + 1, 2, replace=False).tolist())
        return [left - beyond, top - beyond, right - beyond, bottom - beyond]


@pytest.fixture(scope="module")
def files(photo_table: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The table of ``Files``."""
    made = Files(photo_table.paths, tmp_path_factory.mktemp("files")).table
    count = len(made["label"])
    return {name: values[:count] for name, values in made.items()}


def epochs(source: Any, backend: Any, count: int = 1, **options: Any) -> list[Epoch]:
    """The batches of each epoch; what was said, for one that ended with an error."""
    made = image_dataset(source, **{
        "image_size": 24, "cache": "off", "batch_size": 8, "seed": 2, "bad_samples": "skip", "verbose": False,
        "decode": Decode(backend=backend), **options,
    })  # fmt: skip
    assert ("DALI" in made.plan) == (backend == "dali" and options.get("color_mode") != "rgba")
    found: list[Epoch] = []
    for _ in range(count):
        try:
            found.append([[one.numpy() for one in tf.nest.flatten(element)] for element in made])
        except tf.errors.OpError as error:
            found.append(str(error.message).split("Traceback")[0])
    return found


def check_same(source: Any, count: int = 1, **options: Any) -> list[Epoch]:
    """Compare epochs that DALI decodes with those of the default; those."""
    made, expected = (epochs(source, backend, count, **options) for backend in ("dali", "auto"))
    for one, other in zip(made, expected, strict=True):
        if isinstance(other, str):
            assert one == other
            continue
        assert len(one) == len(other)
        for element, same in zip(one, other, strict=True):
            for array, like in zip(element, same, strict=True):
                np.testing.assert_array_equal(array, like)
    return expected


def _brighter(image: Any) -> Any:
    return np.minimum(np.asarray(image).astype(int) + 9, 255).astype(np.uint8)


def _noisy(image: Any, rng: np.random.Generator) -> Any:
    return np.asarray(image.resize((24, 24)), np.float64) + rng.random()


# ---- pixels ---------------------------------------------------------------------------------


@settings(max_examples=30)
@given(
    boxes=st.sampled_from([None, "box", "any"]),
    outside=st.sampled_from(["error", "clip", "pad"]),
    size=st.tuples(st.integers(1, 60), st.integers(1, 60)),
    interpolation=st.sampled_from(["bilinear", "nearest", "bicubic", "area", "lanczos"]),
    color_mode=st.sampled_from(["rgb", "rgb", "grayscale", "rgba"]),
    output=st.sampled_from(["float32", "uint8"]),
    aspect=st.sampled_from(["", "crop_to_aspect_ratio", "pad_to_aspect_ratio"]),
    decode=st.sampled_from([{}, {}, {"exif": True}, {"scaled": True}]),
)
def test_pillows_pixels_are_the_same(files: dict[str, Any], aspect: str, decode: Any, **options: Any) -> None:
    chosen = {aspect: True} if aspect else {}
    size = options.pop("size")
    made, expected = (
        epochs(
            files, backend, image_size=size, shuffle=False, decode=Decode(backend=backend, **decode),
            **chosen, **options,
        )[0]
        for backend in ("dali", "auto")
    )  # fmt: skip
    assert len(made) == len(expected) > 2
    for element, same in zip(made, expected, strict=True):
        for array, like in zip(element, same, strict=True):
            np.testing.assert_array_equal(array, like)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"boxes": "box"},
        {"boxes": "any", "outside": "clip"},
        {"boxes": "box", "interpolation": "bicubic", "antialias": True},
        {"boxes": "box", "interpolation": "nearest"},
        {"color_mode": "grayscale"},
        {"crop_to_aspect_ratio": True},
        {"preprocess": _brighter, "boxes": "box"},
    ],
    ids=lambda options: "-".join(options) or "alone",  # the same in all processes, unlike a function's repr
)
def test_tensorflows_pixels_are_the_same(files: dict[str, Any], options: dict[str, Any]) -> None:
    grey = options.get("color_mode") == "grayscale"
    made, expected = (
        image_dataset(
            files, image_size=(24, 20), parity="tf", cache="off", bad_samples="skip", shuffle=False,
            batch_size=8, decode=Decode(backend=backend), **options,
        )
        for backend in ("dali", "auto")
    )  # fmt: skip
    assert ("DALI" in made.plan) == (not grey)
    for one, other in zip(made, expected, strict=True):
        for array, like in zip(one, other, strict=True):
            np.testing.assert_array_equal(array.numpy(), like.numpy())


@pytest.mark.parametrize("parity", ["auto", "pil"])
def test_folders(photo_tree: Path, parity: Any) -> None:
    check_same(
        str(photo_tree), 2, parity=parity, bad_samples="raise", validation_split=0.3, subset="training"
    )


@pytest.mark.few(4)
@pytest.mark.parametrize("thread_safe", [False, True])
@pytest.mark.parametrize("preprocess", [_brighter, _noisy])
@pytest.mark.parametrize("options", [{}, {"boxes": "box"}, {"boxes": "any", "outside": "pad"}], ids=str)
def test_the_scripts_code_is_given_the_same(
    files: dict[str, Any], thread_safe: bool, preprocess: Any, options: dict[str, Any]
) -> None:
    check_same(files, preprocess=preprocess, thread_safe=thread_safe, **options)


# ---- epochs ---------------------------------------------------------------------------------

_TWO = {"first": {"boxes": "box"}, "second": {"files": "file", "color_mode": "grayscale", "image_size": 9}}


@pytest.mark.parametrize("policy", ["raise", "replace", "skip"])
def test_policies_work_alike(files: dict[str, Any], policy: str, tmp_path: Path) -> None:
    logs = []
    for backend in ("dali", "auto"):
        log = tmp_path / f"{backend}.jsonl"
        found = epochs(
            files,
            backend,
            2,
            modalities=_TWO,
            tabular={"row": "row"},
            bad_samples=BadSamples(policy, log=log),
        )
        assert isinstance(found[0], str) == (policy == "raise")
        lines = log.read_text().splitlines() if log.exists() else []
        logs.append(sorted((json.loads(line)["index"], json.loads(line)["error"]) for line in lines))
    assert logs[0] == logs[1]
    assert bool(logs[0]) == (policy != "raise")
    check_same(files, 2, modalities=_TWO, tabular={"row": "row"}, bad_samples=policy)


def test_a_box_that_reaches_outside_is_the_same_error(photo_table: Any) -> None:
    paths = photo_table.paths[:6]
    boxes = [[0, 0, 9, 9]] * 4 + [[-1, 0, 9, 9], [0, 0, 9, 9]]
    (said,) = check_same(paths, labels=None, boxes=boxes, bad_samples="raise", shuffle=False)
    assert "from (-1, 0) to (9, 9)" in said and "sample 4 " in said


@pytest.mark.few(4)
@pytest.mark.parametrize("where", ["ram", "disk", "little"])
@pytest.mark.parametrize(
    "options", [{}, {"preprocess": _brighter}, {"parity": "tf"}], ids=["alone", "preprocess", "tf"]
)
def test_what_is_kept_is_the_same(
    files: dict[str, Any], where: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    cache = Cache("disk", dir=tmp_path) if where == "disk" else Cache("ram", max_bytes=1 << 28)
    if where == "little":  # room for some samples of each batch
        cache = Cache("ram", max_bytes=60_000)
    check_same(files, 3, boxes="box", cache=cache, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"drop_remainder": True},
        {"batch_size": None},
        {"shard": Shard(1, 3), "bad_samples": "replace"},
        {"shard": Shard(0, 2, "eval"), "bad_samples": "replace"},
        {"threads": 1},
    ],
    ids=str,
)
def test_epochs_are_the_same(files: dict[str, Any], options: dict[str, Any]) -> None:
    check_same(files, 2, tabular={"row": "row"}, **options)


def test_an_epoch_can_be_gone_to(files: dict[str, Any]) -> None:
    expected = epochs(files, "auto", 3)[2]
    made = image_dataset(
        files, image_size=24, cache="off", batch_size=8, seed=2, bad_samples="skip",
        decode=Decode(backend="dali"),
    )  # fmt: skip
    next(iter(made))  # an epoch that is left
    made.set_epoch(2)
    for (images, labels), (same, such) in zip(made, expected, strict=True):
        np.testing.assert_array_equal(images.numpy(), same)
        np.testing.assert_array_equal(labels.numpy(), such)


# ---- who decodes ----------------------------------------------------------------------------


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[list[bool]]:
    """Of each call of DALI's decoder, which of its parts it decoded."""
    calls: list[list[bool]] = []
    decode = DaliDecoder.decode

    def counted(self: DaliDecoder, *arguments: Any) -> list[Any]:
        images = decode(self, *arguments)
        calls.append([image is not None for image in images])
        return images

    monkeypatch.setattr(DaliDecoder, "decode", counted)
    return calls


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Files that were read."""
    paths: list[str] = []
    read_file: Callable[[str], bytes] = image_stream.read_file
    monkeypatch.setattr(image_stream, "read_file", lambda path: paths.append(path) or read_file(path))  # type: ignore[func-returns-value]
    return paths


@pytest.mark.parametrize("parity", ["pil", "tf"])
def test_dali_decodes_all_images_of_a_batch_at_once(
    photo_tree: Path, decoded: list[list[bool]], read: list[str], parity: Any
) -> None:
    jpegs = [str(path) for path in sorted(photo_tree.rglob("*.jp*g"))[:12]]
    table = {"file": jpegs, "box": [[3, 2, 40, 30]] * 12}
    made = image_dataset(
        table, None, modalities={"whole": {}, "part": {"boxes": "box"}}, image_size=16, batch_size=4,
        parity=parity, cache=Cache("ram", max_bytes=1 << 26), decode=Decode(backend="dali"),
    )  # fmt: skip
    assert len(list(made)) == 3
    assert decoded == [[True] * 8] * 3
    assert sorted(read) == sorted(jpegs * 2)
    assert set(made.stage_seconds) >= {"read", "decode", "transform"}
    assert len(list(made)) == 3
    assert len(decoded) == 3 and len(read) == 24, "what is kept is not decoded again"


def test_what_dali_declines_is_decoded_from_what_was_read(
    photo_tree: Path, monkeypatch: pytest.MonkeyPatch, read: list[str]
) -> None:
    jpegs = [str(path) for path in sorted(photo_tree.rglob("*.jp*g"))[:6]]
    expected = epochs(jpegs, "auto", labels=None, bad_samples="raise")
    read.clear()
    monkeypatch.setattr(DaliDecoder, "decode", lambda self, parts: [None] * len(parts))
    made = epochs(jpegs, "dali", labels=None, bad_samples="raise")
    np.testing.assert_array_equal(made, expected)
    assert sorted(read) == jpegs


def test_the_plan_says_who_decodes(photo_table: Any) -> None:
    made = image_dataset(photo_table.paths, None, decode=Decode(backend="dali"))
    assert "the JPEGs of a batch  →  DALI" in made.plan
    assert "libjpeg-turbo" in made.plan and "Decode(backend='dali') is for fastpipe's decoders" in made.plan
    with pytest.raises(OptionError, match=r"engine='graph' cannot .*backend='dali'.*engine='threads' can"):
        image_dataset(photo_table.paths, None, decode=Decode(backend="dali"), engine="graph")


_SCRIPT = """
import sys, fastpipe.tf
made = fastpipe.tf.image_dataset(
    sys.argv[1], image_size=32, decode=fastpipe.Decode(backend="dali"), verbose=False, batch_size=4
)
assert sum(len(images) for images, _ in made) == len(made.file_paths)
batches = iter(made)
next(batches)
"""


@pytest.mark.slow
def test_a_process_ends_in_the_middle_of_an_epoch(photo_tree: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(photo_tree)], capture_output=True, text=True, timeout=100,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Error" not in done.stderr
