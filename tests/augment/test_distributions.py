"""Parameters are distributed as those of the transforms that augmentations replace."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from scipy import stats
from torchvision.transforms import v2

from fastpipe import augment

Reads = dict[str, Any]  # functions of torchvision's parameters
COUNT = 10_000 if os.environ.get("FASTPIPE_HYPOTHESIS") == "nightly" else 4_000
SURE = 1e-4  # at fixed seeds a smaller p is a real difference

Columns = Mapping[str, npt.NDArray[Any]]


def same(ours: npt.ArrayLike, theirs: npt.ArrayLike) -> None:
    """Compare two samples by the Kolmogorov-Smirnov test, and the ends of what they are drawn from."""
    one, other = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    if np.ptp(other) == 0:
        np.testing.assert_array_equal(np.unique(one), np.unique(other))
        return
    assert stats.ks_2samp(one, other, method="asymp").pvalue > SURE
    # The least of 4,000 draws is beyond the 0.005 quantile once in 10**8 runs.
    for end in (0.005, 0.995):
        assert one.min() <= np.quantile(other, end) <= one.max()
        assert other.min() <= np.quantile(one, end) <= other.max()


def uniform(found: npt.NDArray[Any], low: float, high: float) -> None:
    """Compare a sample with the uniform distribution."""
    assert low <= found.min() and found.max() <= high
    assert stats.kstest(found, stats.uniform(low, high - low).cdf).pvalue > SURE


def part(which: npt.NDArray[Any], p: float) -> None:
    """Compare how often something is done with how often it should be, which for 0 and 1 is exact."""
    assert stats.binomtest(int(np.sum(which)), len(which), p).pvalue > SURE


def equally_often(counts: npt.NDArray[Any], wanted: npt.NDArray[Any] | None = None) -> None:
    assert stats.chisquare(counts, wanted).pvalue > SURE


def unrelated(columns: Columns) -> None:
    """Each column that varies is drawn by itself."""
    varying = [one for one in columns.values() if np.ptp(one) > 0]
    if len(varying) > 1:
        found = np.corrcoef(np.argsort(np.argsort(varying, axis=1), axis=1))
        assert abs(found - np.eye(len(varying))).max() < 4.5 / np.sqrt(COUNT)


def drawn(op: Any, shape: tuple[int, ...], seed: int = 1) -> Any:
    return op.draw((COUNT, *shape), generator=torch.Generator().manual_seed(seed))


def named(*names: str) -> Reads:
    return {name: lambda params, name=name: params[name] for name in names}


def nth(theirs: str, *names: str) -> Reads:
    return {name: lambda params, at=at: float(params[theirs][at]) for at, name in enumerate(names)}


BOX = ("top", "left", "height", "width")
ERASED: Reads = {
    name: lambda params, letter=letter: 0.0 if params["v"] is None else params[letter]
    for name, letter in zip(BOX, "ijhw", strict=True)
}
PAIRS = nth("translate", "translate_x", "translate_y") | nth("shear", "shear_x", "shear_y")
KINDS = ("brightness", "contrast", "saturation", "hue")
FACTORS: Reads = {kind: lambda params, kind=kind: params[f"{kind}_factor"] for kind in KINDS}
FACTORS |= nth("fn_idx", "first", "second", "third", "fourth")
IMAGES: list[tuple[str, tuple[Any, ...], dict[str, Any], list[tuple[int, int]], Reads]] = [
    ("RandomResizedCrop", (8,), {}, [(200, 300), (40, 400), (64, 20), (7, 5)], named(*BOX)),
    ("RandomResizedCrop", (8, (0.35, 0.6), (0.5, 2.0)), {}, [(99, 64)], named(*BOX)),
    ("RandomErasing", (1.0,), {}, [(200, 300), (40, 400), (7, 5)], ERASED),
    ("RandomErasing", (1.0, (0.3, 0.9), (1.0, 1.0)), {}, [(60, 40)], ERASED),
    ("RandomAffine", (30, (0.1, 0.3), (0.5, 2.0), (-10, 20, 5, 15)), {}, [(60, 80)], named("angle", "scale") | PAIRS),
    ("RandomAffine", ((10, 60),), {"shear": 20}, [(9, 7)], named("angle") | PAIRS),
    ("RandomRotation", ((-5, 90),), {}, [(9, 7)], named("angle")),
    ("ColorJitter", (0.8, (0.5, 3.0), 1.5, 0.2), {}, [(8, 8)], FACTORS),
    ("GaussianBlur", (5, (0.3, 1.5)), {}, [(8, 8)], nth("sigma", "sigma")),
]  # fmt: skip


@pytest.mark.few(6)
@pytest.mark.parametrize(
    ("name", "given", "options", "size", "reads"),
    [
        pytest.param(name, given, options, size, reads, id=f"{name}{given}{options}, {size}")
        for name, given, options, sizes, reads in IMAGES
        for size in sizes
    ],
)
def test_images(
    name: str, given: tuple[Any, ...], options: dict[str, Any], size: tuple[int, int], reads: Reads
) -> None:
    torch.manual_seed(0)
    transform, image = getattr(v2, name)(*given, **options), torch.empty(3, *size)
    params = [transform.make_params([image]) for _ in range(COUNT)]
    theirs = {column: np.array([read(one) for one in params], np.float64) for column, read in reads.items()}
    ours = drawn(getattr(augment, name)(*given, **options), (3, *size))
    for column in reads:
        same(ours[column], theirs[column])
    if "height" in reads:  # and jointly: where boxes end
        for begin, extent, most in (("top", "height", size[0]), ("left", "width", size[1])):
            same(ours[begin] + ours[extent], theirs[begin] + theirs[extent])
            assert ours[begin].min() >= 0 and (ours[begin] + ours[extent]).max() <= most
        same(ours["height"] * ours["width"], theirs["height"] * theirs["width"])
        same(ours["height"] - ours["width"], theirs["height"] - theirs["width"])
    elif "first" in reads:  # all orders are equally likely, and have nothing to do with the factors
        orders = np.stack([ours[place] for place in ("first", "second", "third", "fourth")], axis=1)
        _, counts = np.unique(orders, axis=0, return_counts=True)
        equally_often(counts)
        assert len(counts) == 24
        unrelated({kind: ours[kind] for kind in (*list(reads)[:4], "first")})
    else:
        unrelated({column: ours[column] for column in reads})


def policy_draws(op: Any, count: int) -> Any:
    return op.draw((count, 3, 331, 662), generator=torch.Generator().manual_seed(0))


def test_a_policy_takes_all_changes_equally_often_and_signs_too() -> None:
    table = policy_draws(augment.RandAugment(2, 12), 14_000)
    for at in range(2):
        change, magnitude = table[f"{at}.change"].astype(int), table[f"{at}.magnitude"]
        equally_often(np.bincount(change, minlength=14))
        for number, (name, (make, is_signed)) in enumerate(v2.RandAugment._AUGMENTATION_SPACE.items()):
            own, made = magnitude[change == number], make(31, 331, 662)
            assert set(np.abs(own)) == {0.0 if made is None else float(made[12])}, name
            assert (own >= 0).all() or is_signed
            if is_signed:
                part(own < 0, 0.5)
    # One after another, independently.
    equally_often(np.bincount((14 * table["0.change"] + table["1.change"]).astype(int), minlength=14 * 14))


def test_a_trivial_policy_takes_all_changes_and_magnitudes_equally_often_and_signs_too() -> None:
    table = policy_draws(augment.TrivialAugmentWide(7), 28_000)
    change, magnitude = table["change"].astype(int), table["magnitude"]
    equally_often(np.bincount(change, minlength=14))
    for number, (name, (make, is_signed)) in enumerate(v2.TrivialAugmentWide._AUGMENTATION_SPACE.items()):
        own, made = magnitude[change == number], make(7, 331, 662)
        wanted = np.zeros(1) if made is None else made.double().numpy()
        assert set(np.abs(own)) == set(wanted), name
        if len(wanted) > 1:
            equally_often(np.array([(np.abs(own) == one).sum() for one in wanted]))
        if is_signed:
            part(own[own != 0] < 0, 0.5)
        assert is_signed or (own >= 0).all()
    bright = magnitude[change == 6]  # a sign has nothing to do with the size
    unrelated({"size": np.abs(bright[bright != 0]), "sign": np.sign(bright[bright != 0])})


@pytest.mark.parametrize("bins", [2, 3, 10, 15, 31, 64, 1000])
def test_a_trivial_policys_magnitudes_are_torchvisions(bins: int) -> None:
    found = augment.TrivialAugmentWide(bins)._magnitudes(331, 662)
    for number, (name, (make, _)) in enumerate(v2.TrivialAugmentWide._AUGMENTATION_SPACE.items()):
        made = make(bins, 331, 662)
        assert np.array_equal(found[:, number], 0 * found[:, 0] if made is None else made.numpy()), name


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_probabilities(p: float) -> None:
    for op, name in (
        (augment.RandomHorizontalFlip(p), "is_flipped"), (augment.RandomVerticalFlip(p), "is_flipped"),
        (augment.RandomGrayscale(p), "is_grey"), (augment.RandomErasing(p), "height"),
        (augment.RandomApply(augment.RandomGrayscale(1.0), p), "is_applied"),
        (augment.MotionMirror(p=p), "is_mirrored"), (augment.RandomFlip3D(0, p=p), "flips_depth"),
        (augment.RandomRotate90(p=p), "turns"),
    ):  # fmt: skip
        part(drawn(op, (3, 64, 64) if op.kind != "volumes" else (1, 4, 64, 64))[name] > 0, p)


def test_what_is_applied_together_is_drawn_apart() -> None:
    chain = augment.Compose([
        augment.RandomHorizontalFlip(),
        augment.RandomApply([augment.ColorJitter(0.4), augment.RandomGrayscale(0.5)], 0.5),
        augment.RandomVerticalFlip(), augment.RandomApply(augment.ColorJitter(0.4), 0.5),
    ])  # fmt: skip
    first, some, last, other = drawn(chain, (3, 8, 8))
    unrelated({
        "first": first["is_flipped"], "last": last["is_flipped"], "some": some["is_applied"],
        "brightness": some["0.brightness"], "grey": some["1.is_grey"], "other": other["is_applied"],
        "other brightness": other["0.brightness"],
    })  # fmt: skip
    again = drawn(chain, (3, 8, 8), seed=2)  # neither the next sample nor the next batch repeats anything
    factors = some["0.brightness"]
    unrelated({"now": factors[:-1], "next": factors[1:], "next batch": again[1]["0.brightness"][:-1]})


@pytest.mark.parametrize("alpha", [0.2, 1.0, 3.0])
def test_mixing(alpha: float) -> None:
    torch.manual_seed(0)
    for name in ("MixUp", "CutMix"):
        theirs = getattr(v2, name)(alpha=alpha, num_classes=2)
        params = [theirs.make_params([torch.empty(2, 3, 40, 52)]) for _ in range(COUNT)]
        op = getattr(augment, name)(alpha=alpha, num_classes=2, per_sample=True)
        ours = drawn(op, (3, 40, 52))
        if name == "MixUp":
            same(ours["kept"].round(6), np.round([one["lam"] for one in params], 6))  # theirs are float32
            continue
        boxes = np.array([one["box"] for one in params])
        for at, edge in enumerate(("left", "top", "right", "bottom")):
            same(ours[edge], boxes[:, at])
        areas = (ours["right"] - ours["left"]) * (ours["bottom"] - ours["top"])
        same(1 - areas / (40 * 52), [one["lam_adjusted"] for one in params])


def test_noise_that_erases_is_normal() -> None:
    op = augment.RandomErasing(1.0, (0.5, 0.5), (1.0, 1.0), value="random")
    images = op(torch.full((20, 3, 64, 64), 9.0), generator=torch.Generator().manual_seed(0))
    noise = images[images != 9.0].numpy()
    assert len(noise) > COUNT and stats.kstest(noise[:: len(noise) // COUNT], stats.norm.cdf).pvalue > SURE


def test_masks_are_those_of_the_example(example: Any) -> None:
    op, places = augment.SpecAugment(1, 4, 1, 8), torch.arange(32 * 16.0).reshape(32, 16)
    ours, theirs = drawn(op, (32, 16)), []
    torch.manual_seed(0)
    with example("hdf5_mel") as scripts:
        for _ in range(COUNT):
            is_kept = scripts["before"].masked(places.clone()) == places
            rows, columns = is_kept.any(1).numpy(), is_kept.any(0).numpy()
            theirs.append([(one.argmin() * (not one.all()), (~one).sum()) for one in (columns, rows)])
    for name, (begin, extent) in zip(("time0", "freq1"), np.transpose(theirs, (1, 2, 0)), strict=True):
        width = ours[f"{name}_end"] - ours[f"{name}_begin"]
        same(width, extent)
        same(np.where(width > 0, ours[f"{name}_begin"], 0), begin)
        counts = np.bincount(width.astype(int))
        equally_often(counts)
        assert len(counts) == (4 if name == "time0" else 8)


def test_gains_and_shifts_are_uniform() -> None:
    uniform(drawn(augment.RandomGain((-2.0, 6.0)), (8, 50))["gain_db"], -2, 6)
    for most, rolls in ((10, True), (0.25, False)):
        shift = drawn(augment.TimeShift(most, rolls), (8, 40))["shift"].astype(int)
        assert shift.min() == -10 and shift.max() == 10
        equally_often(np.bincount(shift + 10))


def test_volumes_are_changed_by_nnunets_distributions() -> None:
    affine, noise, blur, bright, contrast, low, inverted, gamma, flips = drawn(
        augment.nnunet_default(), (2, 6, 8, 8)
    )
    is_rotated, is_scaled = affine["angle_depth"] != 0, affine["scale"] != 1
    for which in (is_rotated, is_scaled):
        part(which, 0.2)
    part(is_rotated & is_scaled, 0.04)
    for axis in ("depth", "height", "width"):
        uniform(affine[f"angle_{axis}"][is_rotated], -30, 30)
        part(flips[f"flips_{axis}"], 0.5)
    uniform(affine["scale"][is_scaled], 0.7, 1.4)
    uniform(noise["0.std"], 0.0, 0.1)
    chances = (0.1, 0.2, 0.15, 0.15, 0.25, 0.1, 0.3)
    for op, p in zip((noise, blur, bright, contrast, low, inverted, gamma), chances, strict=True):
        part(op["is_applied"], p)
    for c in range(2):
        part(blur[f"0.{c}.is_blurred"], 0.5)
        part(low[f"0.{c}.is_changed"], 0.5)
        for axis in ("depth", "height", "width"):
            uniform(blur[f"0.{c}.sigma_{axis}"], 0.5, 1.0)
        uniform(low[f"0.{c}.scale"], 0.5, 1.0)
        for op, least, most in (
            (bright, 0.75, 1.25),
            (contrast, 0.75, 1.25),
            (inverted, 0.7, 1.5),
            (gamma, 0.7, 1.5),
        ):
            factor = op[f"0.{c}.factor"]
            part(factor < 1, 0.5)
            uniform(factor[factor < 1], least, 1)
            uniform(factor[factor >= 1], 1, most)
    unrelated({
        "noise": noise["is_applied"], "std": noise["0.std"], "blur": blur["0.0.sigma_depth"],
        "next axis": blur["0.0.sigma_height"], "next channel": blur["0.1.sigma_depth"],
        "bright": bright["0.0.factor"], "contrast": contrast["0.0.factor"], "low": low["0.0.scale"],
        "inverted": inverted["0.0.factor"], "gamma": gamma["0.0.factor"], "flip": flips["flips_depth"],
    })  # fmt: skip


def test_volumes_are_changed_as_by_batchgenerators(monkeypatch: pytest.MonkeyPatch) -> None:
    """The classes that nnU-Net's trainer uses, with its arguments."""

    def theirs_of(module: str, name: str) -> Any:
        path = f"batchgeneratorsv2.transforms.{module}"
        return getattr(pytest.importorskip(path, reason="needs batchgeneratorsv2: make peers"), name)

    contrast = theirs_of("intensity.contrast", "BGContrast")((0.75, 1.25))
    blur = theirs_of("noise.gaussian_blur", "GaussianBlurTransform")((0.5, 1.0), False, False, 0.5)
    low = theirs_of("spatial.low_resolution", "SimulateLowResolutionTransform")(
        (0.5, 1), False, True, None, None, 0.5
    )
    spatial = theirs_of("spatial.spatial", "SpatialTransform")
    np.random.seed(0)
    torch.manual_seed(0)
    seen: list[tuple[Any, Any]] = []
    note: Any = lambda *given: seen.append(given) or np.eye(3)  # noqa: E731
    monkeypatch.setattr(f"{spatial.__module__}.create_affine_matrix_3d", note)
    half = np.deg2rad(30)
    theirs = spatial(
        (2, 2, 2), 0, False, p_rotation=0.2, rotation=(-half, half), p_scaling=0.2, scaling=(0.7, 1.4),
        p_synchronize_scaling_across_axes=1,
    )  # fmt: skip
    image = torch.zeros(1, 2, 2, 2)
    for _ in range(COUNT):
        count = len(seen)
        theirs.get_parameters(image=image)
        if len(seen) == count:
            seen.append(([0, 0, 0], [1, 1, 1]))
    angles, scales = (np.array(one) for one in zip(*seen, strict=True))
    ours = drawn(augment.nnunet_default().ops[0], (1, 2, 2, 2))
    for at, axis in enumerate(("depth", "height", "width")):
        same(ours[f"angle_{axis}"], np.rad2deg(angles[:, at]))
        same(ours["scale"], scales[:, at])
    factor = drawn(augment.Brightness3D(), (1, 2, 2, 2))["0.factor"]
    same(factor, [contrast() for _ in range(COUNT)])
    found = [blur.get_parameters(image=image) for _ in range(COUNT)]
    sigmas = np.array([one["sigmas"][0] if one["apply_to_channel"][0] else [0, 0, 0] for one in found])
    own = drawn(augment.GaussianBlur3D(p_channel=0.5), (1, 2, 2, 2))
    for at, axis in enumerate(("depth", "height", "width")):
        same(own[f"0.sigma_{axis}"] * own["0.is_blurred"], sigmas[:, at])
    found = [low.get_parameters(image=image)["scales"] for _ in range(COUNT)]
    own = drawn(augment.LowResolution3D(p_channel=0.5), (1, 2, 2, 2))
    same(own["0.scale"] * own["0.is_changed"], [float(one[0, 0]) if len(one) else 0.0 for one in found])


def test_quarter_turns_and_shifts_of_volumes() -> None:
    turns = drawn(augment.RandomRotate90(p=0.6), (1, 2, 2, 2))["turns"].astype(int)
    equally_often(np.bincount(turns), COUNT * np.array([0.4, 0.2, 0.2, 0.2]))
    shifts = drawn(augment.RandomAffine3D(translate=(0.1, 0.0, 0.5)), (1, 10, 10, 10))
    uniform(shifts["shift_depth"], -1, 1)
    uniform(shifts["shift_width"], -5, 5)
    assert not shifts["shift_height"].any()


def test_volumes_are_bent_as_in_the_example(example: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where voxels come from, of a volume whose values are places."""
    size, voxels, count = (4, 6, 6), [(0, 0, 0), (2, 3, 3), (1, 2, 4), (3, 5, 0)], COUNT // 4
    torch.manual_seed(0)
    with example("volume_patches") as scripts:
        before, theirs = scripts["before"], []
        blank = np.zeros(size, np.float32)
        monkeypatch.setattr(before, "map_coordinates", lambda image, places, *rest, **options: places)
        for _ in range(count):
            places, _ = before.elastic(blank, blank)
            theirs.append([places[(slice(None), *voxel)] for voxel in voxels])
        op = augment.RandomElastic3D(before.POINTS, before.BEND, fill="edge")
    ramps = torch.from_numpy(np.indices(size, np.float32)).expand(count, -1, -1, -1, -1)
    made = op(ramps, generator=torch.Generator().manual_seed(0)).numpy()
    ours = made[(slice(None), slice(None), *zip(*voxels, strict=True))].astype(np.float64).round(5)
    wanted = np.clip(np.array(theirs), 0, np.array(size) - 1).round(5)  # the nearest voxel is what is beyond
    for at in range(len(voxels)):
        for axis in range(3):
            same(ours[:, axis, at], wanted[:, at, axis])
    unrelated({f"{axis}": ours[:, axis, 1] for axis in range(3)})


def test_noise_of_volumes_is_normal() -> None:
    op, blank = augment.GaussianNoise3D((0.3, 0.3)), torch.zeros(4, 1, 20, 25, 25)
    for one in op(blank, generator=torch.Generator().manual_seed(0)).numpy():
        assert stats.kstest(one.ravel(), stats.norm(0, 0.3).cdf).pvalue > SURE


def test_motion_is_changed_as_in_the_example(example: Any) -> None:
    """Speed, place and scale are read off what became of a joint that goes ahead steadily."""
    rng = np.random.default_rng(0)
    with example("motion_generation") as scripts:
        before, frames = scripts["before"], scripts["actor"].FRAMES
        motion = np.zeros((frames, scripts["actor"].JOINTS, 3))
        motion[:, :, 2] = np.arange(frames)[:, None] / frames
        found: dict[str, Any] = {
            kind: np.array(
                [before.augment_motion_sequence(motion, kind, rng)[[0, 100], 0] for _ in range(COUNT // 2)]
            )
            for kind in ("speed", "position", "scale")
        }
        ours = {
            name: drawn(op, (frames, 25, 3))
            for name, op in zip(found, scripts["after"].AUGMENTATIONS.ops, strict=False)
        }
    same(ours["speed"]["speed"], found["speed"][:, 1, 2] * frames / 100)
    for at in range(3):
        same(ours["position"][f"shift{at}"], found["position"][:, 0, at])
    same(ours["scale"]["factor"], found["scale"][:, 1, 2] * frames / 100)
