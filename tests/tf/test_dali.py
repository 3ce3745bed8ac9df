"""Batches that DALI decodes, beside those of the other decoders: the same to the last bit, whatever the files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from odd_images import damaged_at_random, odd_images
from PIL import Image

from fastpipe import Cache, Decode, Shard
from fastpipe.errors import OptionError
from fastpipe.images.dali import DaliDecoder
from fastpipe.tf import image_dataset, image_stream

# Pillow warns of palettes with transparency and of truncated metadata, whoever asks it.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:PIL", "ignore:Palette images with Transparency")

Epoch = list[list[np.ndarray[Any, Any]]] | str


@pytest.fixture(scope="module")
def files(photo_table: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A table of photographs, odd files and damaged ones, some of which cannot be read.

    Boxes of the column "box" are inside, those of "any" may reach outside."""
    folder, rng = tmp_path_factory.mktemp("files"), np.random.default_rng(3)
    paths = [str(case.path) for case in odd_images(folder / "odd") if case.expect == "ok"][::2]
    paths += photo_table.paths[:16]
    for number in range(24):
        path = folder / f"{number:02}.jpg"
        with Image.open(photo_table.paths[number % len(photo_table)]) as photo:
            photo.convert("RGB").resize((90, 70)).save(path, quality=85, progressive=number % 3 == 0)
        path.write_bytes(damaged_at_random(path.read_bytes(), rng))
        paths.append(str(path))
    paths = [paths[place] for place in rng.permutation(len(paths) // 2 * 2)]

    def box(path: str, beyond: int) -> list[int]:
        with Image.open(path) as image:
            first = rng.integers(-beyond, image.size)
            last = rng.integers(np.maximum(0, first) + 1, np.array(image.size) + beyond + 1)
        return [*first.tolist(), *last.tolist()]

    return {
        "file": paths, "row": list(range(len(paths))), "label": ["a", "b"] * (len(paths) // 2),
        "box": [box(path, 0) for path in paths], "any": [box(path, 9) for path in paths],
    }  # fmt: skip


def epochs(source: Any, backend: Any, count: int = 1, **options: Any) -> list[Epoch]:
    """The batches of each epoch; what was said, for one that ended with an error."""
    decode = options.pop("decode", {})
    made = image_dataset(source, **{
        "image_size": 24, "cache": "off", "batch_size": 8, "seed": 2, "bad_samples": "skip", "verbose": False,
        "decode": Decode(backend=backend, **decode), **options,
    })  # fmt: skip
    cannot = {"rgba"} | ({"grayscale"} if options.get("parity") == "tf" else set())
    assert ("DALI" in made.plan) == (backend == "dali" and options.get("color_mode") not in cannot)
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
        for array, like in zip(sum(one, []), sum(other, []), strict=True):  # type: ignore[arg-type]
            np.testing.assert_array_equal(array, like)
    return expected


def _brighter(image: Any) -> Any:
    return np.minimum(np.asarray(image).astype(int) + 9, 255).astype(np.uint8)


def _noisy(image: Any, rng: np.random.Generator) -> Any:
    return np.asarray(image.resize((24, 24)), np.float64) + rng.random()


@settings(max_examples=15)
@given(
    boxes=st.sampled_from([None, "box", "any"]),
    outside=st.sampled_from(["error", "clip", "pad"]),
    image_size=st.tuples(st.integers(1, 60), st.integers(1, 60)),
    interpolation=st.sampled_from(["bilinear", "nearest", "bicubic", "area", "lanczos"]),
    color_mode=st.sampled_from(["rgb", "rgb", "grayscale", "rgba"]),
    output=st.sampled_from(["float32", "uint8"]),
    aspect=st.sampled_from(["", "crop_to_aspect_ratio", "pad_to_aspect_ratio"]),
    decode=st.sampled_from([{}, {}, {"exif": True}, {"scaled": True}]),
)
def test_pixels_of_pillow_are_the_same(files: dict[str, Any], aspect: str, **options: Any) -> None:
    ((*batches,),) = check_same(files, shuffle=False, **({aspect: True} if aspect else {}), **options)
    assert len(batches) > 2


_TF = {"parity": "tf", "shuffle": False, "image_size": (24, 20)}
_TWO = {"first": {"boxes": "box"}, "second": {"files": "file", "color_mode": "grayscale", "image_size": 9}}


@pytest.mark.few(5)
@pytest.mark.parametrize(
    "options",
    [
        _TF, {**_TF, "boxes": "box"}, {**_TF, "boxes": "any", "outside": "clip"},
        {**_TF, "boxes": "box", "interpolation": "bicubic", "antialias": True},
        {**_TF, "boxes": "box", "interpolation": "nearest"}, {**_TF, "color_mode": "grayscale"},
        {**_TF, "crop_to_aspect_ratio": True}, {**_TF, "boxes": "box", "preprocess": _brighter},
        {"preprocess": _brighter, "thread_safe": True}, {"preprocess": _noisy, "boxes": "box"},
        {"preprocess": _noisy, "boxes": "any", "outside": "pad", "thread_safe": True},
        {"drop_remainder": True}, {"batch_size": None}, {"threads": 1},
        {"shard": Shard(1, 3), "bad_samples": "replace"}, {"shard": Shard(0, 2, "eval"), "bad_samples": "replace"},
        {"modalities": _TWO, "tabular": {"row": "row"}}, {"modalities": _TWO, "bad_samples": "replace"},
        {"modalities": _TWO, "bad_samples": "raise"},
    ],
    ids=lambda options: "-".join(options),  # the same in all processes, unlike a function's repr
)  # fmt: skip
def test_epochs_are_the_same(files: dict[str, Any], options: dict[str, Any]) -> None:
    first, _ = check_same(files, 2, **options)
    assert isinstance(first, str) == (options.get("bad_samples") == "raise")


@pytest.mark.parametrize("parity", ["auto", "pil"])
def test_epochs_of_a_folder_are_the_same(photo_tree: Path, parity: Any) -> None:
    split = {"validation_split": 0.3, "subset": "training"}
    check_same(str(photo_tree), 2, parity=parity, bad_samples="raise", **split)


@pytest.mark.few(2)
@pytest.mark.parametrize("where", ["ram", "disk", "little"])
@pytest.mark.parametrize("options", [{}, {"preprocess": _brighter}, _TF], ids=["alone", "preprocess", "tf"])
def test_kept_samples_are_the_same(files: Any, where: str, options: dict[str, Any], tmp_path: Path) -> None:
    caches = {
        "ram": Cache("ram", max_bytes=1 << 28), "disk": Cache("disk", dir=tmp_path),
        "little": Cache("ram", max_bytes=60_000),  # room for some samples of each batch
    }  # fmt: skip
    check_same(files, 3, boxes="box", **{**options, "cache": caches[where]})


def test_it_continues_with_any_epoch(files: dict[str, Any]) -> None:
    options: Any = {"image_size": 24, "cache": "off", "batch_size": 8, "seed": 2, "bad_samples": "skip"}
    made = image_dataset(files, decode=Decode(backend="dali"), **options)
    next(iter(made))  # an epoch that is left
    made.set_epoch(2)
    for element, same in zip(made, epochs(files, "auto", 3)[2], strict=True):
        for array, like in zip(element, same, strict=True):
            np.testing.assert_array_equal(array.numpy(), like)


@pytest.mark.parametrize("parity", ["pil", "tf"])
def test_dali_decodes_all_images_of_a_batch_at_once(photo_tree: Path, monkeypatch: Any, parity: Any) -> None:
    decoded: list[list[bool]] = []  # of each call, which of its parts it decoded
    read: list[str] = []
    decode, read_file = DaliDecoder.decode, image_stream.read_file

    def counted(self: DaliDecoder, *arguments: Any) -> list[Any]:
        images = decode(self, *arguments)
        decoded.append([image is not None for image in images])
        return images

    monkeypatch.setattr(DaliDecoder, "decode", counted)
    monkeypatch.setattr(image_stream, "read_file", lambda path: (read.append(path), read_file(path))[1])
    jpegs = [str(path) for path in sorted(photo_tree.rglob("*.jp*g"))[:12]]
    made = image_dataset(
        {"file": jpegs, "box": [[3, 2, 40, 30]] * 12}, None, image_size=16, batch_size=4, parity=parity,
        modalities={"whole": {}, "part": {"boxes": "box"}}, cache=Cache("ram", max_bytes=1 << 26),
        decode=Decode(backend="dali"),
    )  # fmt: skip
    assert len(list(made)) == 3
    assert decoded == [[True] * 8] * 3
    assert sorted(read) == sorted(jpegs * 2)
    assert set(made.stage_seconds) >= {"read", "decode", "transform"}
    assert len(list(made)) == 3
    assert len(decoded) == 3 and len(read) == 24, "what is kept is not decoded again"
    options: Any = {"labels": None, "bad_samples": "raise", "parity": parity}
    expected = epochs(jpegs[:6], "auto", **options)
    read.clear()  # images that it declines are decoded from what was read
    monkeypatch.setattr(DaliDecoder, "decode", lambda self, parts: [None] * len(parts))
    np.testing.assert_array_equal(epochs(jpegs[:6], "dali", **options), expected)
    assert sorted(read) == jpegs[:6]


def test_the_plan_says_who_decodes(photo_table: Any) -> None:
    made = image_dataset(photo_table.paths, None, decode=Decode(backend="dali"))
    assert "the JPEGs of a batch  →  DALI" in made.plan
    assert "native core" in made.plan and "Decode(backend='dali') is for fastpipe's decoders" in made.plan
    with pytest.raises(OptionError, match=r"engine='graph' cannot .*backend='dali'.*engine='threads' can"):
        image_dataset(photo_table.paths, None, decode=Decode(backend="dali"), engine="graph")
