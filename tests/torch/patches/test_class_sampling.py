"""``Foreground(classes=, ratios=, image_threshold=)``: centres are as likely as MONAI's, by a simulation in NumPy."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from volume_kinds import write_volume

from fastpipe import FastPatchDataset, Rescale
from fastpipe.errors import OptionError
from fastpipe.sampling import Foreground
from fastpipe.volumes import sampling, scans

pytestmark = pytest.mark.usefixtures("same_generators", "small_units")

SHAPE, PATCH, DRAWS = (9, 10, 11), (3, 4, 5), 20_000
EACH = (*[range(1, 4)], 0)  # MONAI's foreground and background, of three labels


def labels() -> Any:
    """A background with a few voxels of three classes, of unequal sizes."""
    random = np.random.default_rng(0)
    return random.choice(4, SHAPE, p=[0.9, 0.06, 0.03, 0.01]).astype(np.uint8)


def image() -> Any:
    return np.random.default_rng(1).integers(-5, 6, SHAPE).astype(np.int16)


def start_of(centres: Any) -> Any:
    """Return where MONAI's patch begins: ``correct_crop_centers``, then ``SpatialCrop``."""
    size, shape = np.array(PATCH), np.array(SHAPE)
    first, end = size // 2, (shape + 1 - size / 2).astype(np.uint16)
    end = np.where(first == end, end + 1, end)
    return np.minimum(np.maximum(centres, first), end.astype(np.int64) - 1) - size // 2


def probabilities(classes: Any, ratios: Any) -> Any:
    """Return the probability of each start: a class by its ratio, then one of its voxels, as MONAI draws them."""
    found, total = (
        np.zeros(SHAPE),
        sum(ratio for one, ratio in zip(classes, ratios, strict=True) if one.any()),
    )
    for is_inside, ratio in zip(classes, ratios, strict=True):
        starts = start_of(np.argwhere(is_inside))
        if len(starts):
            np.add.at(found, tuple(starts.T), ratio / total / len(starts))
    return found


def check(expected: Any, options: Any, draws: int = DRAWS, **more: Any) -> None:
    """The sum of squares of a chi-square test, of starts that are likely enough; 6 deviations are allowed."""
    given: Any = {"labels": labels(), "seed": 7, **more}
    volume = given.pop("volume", image())
    dataset = FastPatchDataset(volume, PATCH, sampling=Foreground(draws, 1.0, **options), **given)
    starts = dataset.places()[1]
    counts = np.zeros(SHAPE)
    np.add.at(counts, tuple(starts.T), 1)
    assert not counts[expected == 0].any()
    is_likely = expected * draws >= 5
    expected, counts = expected[is_likely] * draws, counts[is_likely]
    degrees = len(counts)
    assert abs(((counts - expected) ** 2 / expected).sum() - degrees) < 6 * np.sqrt(2 * degrees)
    assert abs(counts.sum() - expected.sum()) < 6 * np.sqrt(draws)


@pytest.mark.parametrize(("pos", "neg"), [(1, 1), (3, 1), (1, 0), (0, 2)])
def test_positive_and_negative_centres_are_monais(pos: int, neg: int) -> None:
    """RandCropByPosNegLabeld(pos, neg)."""
    found = labels()
    check(probabilities([found > 0, found == 0], [pos, neg]), {"classes": EACH, "ratios": (pos, neg)})


@pytest.mark.parametrize("threshold", [0, 3.5])
def test_the_background_is_within_the_image(threshold: float) -> None:
    """RandCropByPosNegLabeld(image_key=…, image_threshold=…): the foreground need not be above it."""
    found = labels()
    classes = [found > 0, (found == 0) & (image() > threshold)]
    options = {"classes": EACH, "ratios": (1, 2), "image_threshold": threshold}
    check(probabilities(classes, [1, 2]), options)
    # A voxel is above it if any of its channels is.
    check(probabilities(classes, [1, 2]), options, volume=np.stack([image(), np.full(SHAPE, -9, np.int16)]))


def test_the_threshold_is_one_of_normalised_values() -> None:
    """As in MONAI, where the image is normalised before: from -5 … 5 to 0 … 1."""
    found = labels()
    classes = [found > 0, (found == 0) & (image() > 2)]
    options = {"classes": EACH, "ratios": (1, 1), "image_threshold": 0.75}
    check(probabilities(classes, [1, 1]), options, normalize=Rescale())


@pytest.mark.parametrize("ratios", [(1, 1, 1, 1), (1, 2, 3, 4), (0, 5, 0, 1), None])
def test_classes_are_as_likely_as_monais(ratios: Any) -> None:
    """RandCropByLabelClassesd(ratios, num_classes=4), and TorchIO's label_probabilities."""
    found, classes = labels(), (0, 1, 2, 3)
    check(
        probabilities([found == one for one in classes], ratios or [1] * 4),
        {"classes": classes, "ratios": ratios},
    )


def test_classes_that_a_volume_does_not_have_are_left_out() -> None:
    found = labels()
    found[found == 2] = 0
    expected = probabilities([found == one for one in (0, 1, 2, 3)], [1, 2, 3, 4])
    check(expected, {"classes": (0, 1, 2, 3), "ratios": (1, 2, 3, 4)}, labels=found)
    expected = probabilities([found == 2, found == 0], [3, 1])
    check(expected, {"classes": (2, 0), "ratios": (3, 1)}, labels=found)
    none = np.zeros(SHAPE, np.uint8)
    check(probabilities([none > 0, none == 0], [1, 1]), {"classes": EACH, "ratios": (1, 1)}, labels=none)


def test_regions_overlap() -> None:
    """nnU-Net's regions: the whole tumour, its core, and what enhances."""
    found, regions = labels(), ((1, 2, 3), (2, 3), (3,))
    check(probabilities([np.isin(found, one) for one in regions], [1, 1, 1]), {"classes": regions})


def test_the_kept_voxels_of_a_group_are_of_all_its_labels() -> None:
    """Each of the few voxels that are kept is as likely of any voxel of the group, whatever its label."""
    found = np.zeros((40, 50, 60), np.uint8)
    found[:, :, :30], found[:, :, 30:40] = 1, 2
    options = Foreground(4000, 1.0, classes=((1, 2),), voxels=2000)
    starts = FastPatchDataset(found, PATCH, labels=found, sampling=options, seed=1).places()[1]
    assert len(np.unique(starts, axis=0)) <= 2000
    assert (starts[:, 2] + 2 < 30).mean() == pytest.approx(0.75, abs=0.04)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"ratios": (1, 2)}, "needs classes="),
        ({"classes": (0, 1), "ratios": (1,)}, "must be 2 numbers from 0"),
        ({"classes": (0, 1), "ratios": (1, -1)}, "must be 2 numbers from 0"),
        ({"classes": (0, 1), "ratios": (0, 0)}, "and not all of them 0"),
        ({"classes": (0, 1), "ratios": (1, np.inf)}, "must be 2 numbers from 0"),
        ({"classes": (0, 1), "ratios": "ab"}, "must be 2 numbers from 0"),
        ({"classes": (0, ())}, "must be a tuple of labels, or of tuples"),
        ({"classes": (0, (1, np.nan))}, "must be a tuple of labels, or of tuples"),
        ({"classes": (0, ("a",))}, "must be a tuple of labels, or of tuples"),
        ({"classes": (1, 2), "image_threshold": 0}, "name it in classes="),
        ({"image_threshold": 0}, "name it in classes="),
        ({"classes": (0, 1), "image_threshold": "0"}, "must be a number or None"),
        ({"classes": (0, 1), "image_threshold": np.nan}, "must be a number or None"),
    ],
)
def test_options_that_cannot_work_are_refused(options: Any, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        Foreground(10, **options)


def test_options_are_equal_however_they_are_written() -> None:
    assert Foreground(10, classes=[range(1, 3), 0], ratios=[1, 2]) == Foreground(  # type: ignore[arg-type]
        10, classes=((1, 2), 0), ratios=(1.0, 2.0)
    )


@pytest.mark.usefixtures("later")
def test_tables_belong_to_the_image_and_its_options_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[str] = []

    def scan(roles: Any, number: int, look: Any) -> None:
        passes.append(os.path.basename(roles[0].volumes[number].name))
        scans.scan(roles, number, look)

    monkeypatch.setattr(sampling, "scan", scan)
    volume, other = (
        write_volume("npy", tmp_path / name, some, ()) for name, some in (("x", image()), ("y", labels()))
    )

    def places(options: Any, **more: Any) -> Any:
        given = Foreground(500, 1.0, classes=EACH, **options)
        return FastPatchDataset(volume, PATCH, labels=other, sampling=given, seed=0, **more).places()[1]

    plain = places({})
    above = places({"image_threshold": 2})
    assert len(passes) == 2 and not np.array_equal(plain, above)
    np.testing.assert_array_equal(places({"image_threshold": 2, "ratios": (1, 1)}), above)
    assert len(passes) == 2  # ratios need no pass
    places({"image_threshold": 3}), places({"image_threshold": 2}, normalize=Rescale((0, 9)))
    assert len(passes) == 4
    np.save(volume, -image())
    assert not np.array_equal(places({"image_threshold": 2}), above)
    assert len(passes) == 5
