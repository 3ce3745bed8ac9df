"""``Decode(scaled=True)``: what Pillow makes of an image that it was told to decode smaller."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_steps import Crop, Flip, Resize, fold, pillow_resize
from PIL import Image
from torchvision import transforms

from fastpipe import Decode, FastImageFolder
from fastpipe.bench.synthetic import photograph
from fastpipe.core.types import Box, Size
from fastpipe.images.pillow_rules import FILTERS
from fastpipe.images.pixels import reduction, render
from fastpipe.images.reader import ImageReader

SIZE = Size(777, 1001)


@pytest.fixture(scope="module", params=["", "progressive", "grey", "simplejpeg"])
def case(request: pytest.FixtureRequest) -> tuple[bytes, ImageReader]:
    image, file = Image.fromarray(photograph(np.random.default_rng(3), SIZE)), io.BytesIO()
    image.convert("L" if request.param == "grey" else "RGB").save(
        file, "JPEG", progressive=request.param == "progressive"
    )
    backend: Any = "simplejpeg" if request.param == "simplejpeg" else "auto"
    return file.getvalue(), ImageReader(Decode(scaled=True, backend=backend))


BOXES = [Box(0, 0, *SIZE), Box(3, 9, 700, 960), Box(101, 35, 400, 333), Box(7, 5, 600, 200)]
SIZES = [Size(24, 24), Size(97, 160), Size(60, 48), Size(300, 400)]


def factor_of(*operations: Any) -> int:
    region: Any = fold(operations, SIZE)
    return reduction(region, SIZE)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("box", BOXES)
@pytest.mark.parametrize("to", SIZES)
def test_it_equals_pillows_draft_and_box(
    case: tuple[bytes, ImageReader], box: Box, to: Size, turned: bool
) -> None:
    data, reader = case
    operations: Any = [Crop(box), pillow_resize(FILTERS["bilinear"], to)._replace(order=0)]
    factor = factor_of(*operations)
    region: Any = fold([*operations, *[Flip(True, True)] * turned], SIZE)
    made = render(reader.open(data, "x.jpg"), region)
    draft = Image.open(io.BytesIO(data))
    draft.draft("RGB", (SIZE.width // factor, SIZE.height // factor))
    part = [number / factor for number in (box.left, box.top, box.left + box.width, box.top + box.height)]
    small = draft.convert("RGB")
    rows = small.resize(
        (to.width, small.height), Image.Resampling.BILINEAR, (part[0], 0, part[2], small.height)
    )
    expected = np.asarray(
        rows.resize((to.width, to.height), Image.Resampling.BILINEAR, (0, part[1], to.width, part[3]))
    )
    if factor == 1:
        expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB").crop((
            box.left, box.top, box.left + box.width, box.top + box.height
        )).resize((to.width, box.height), Image.Resampling.BILINEAR).resize((to.width, to.height), Image.Resampling.BILINEAR))  # fmt: skip
    np.testing.assert_array_equal(made, expected[::-1, ::-1] if turned else expected)


def test_cases_with_and_without_reduction_are_among_them() -> None:
    assert {factor_of(Crop(box), Resize(to, 1)) for box in BOXES for to in SIZES} == {1, 2, 4, 8}


@pytest.mark.parametrize("scaled", [False, True])
def test_a_dataset_is_scaled_only_if_it_is_asked_to(tmp_path: Path, scaled: bool) -> None:
    (tmp_path / "a").mkdir()
    Image.fromarray(photograph(np.random.default_rng(1), (480, 640))).save(tmp_path / "a" / "1.jpg")
    transform = transforms.Compose([transforms.Resize(64), transforms.PILToTensor()])
    exact = transform(Image.open(tmp_path / "a" / "1.jpg").convert("RGB"))
    made = FastImageFolder(tmp_path, transform, decode=Decode(scaled=scaled), cache="off")[0][0]
    difference = (made.int() - exact.int()).abs()
    assert 0 < difference.max() <= 40 if scaled else difference.max() == 0
    assert difference.float().mean() < 2


def test_enlarging_cropping_and_nearest_are_never_scaled() -> None:
    for operations in (
        [Crop(Box(0, 0, 100, 100)), Resize(Size(224, 224), 1)],
        [Crop(Box(0, 0, 700, 900))],
        [Resize(Size(24, 24), FILTERS["nearest"])],
        [Crop(Box(-1, 0, 700, 900)), Resize(Size(24, 24), 1)],
    ):
        assert factor_of(*operations) == 1
