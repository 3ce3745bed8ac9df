"""Patches of normalised volumes: the statistics are NumPy's of the whole volume, the formulas MONAI's and TorchIO's."""

from __future__ import annotations

import os
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from volume_kinds import cut, equal, random_array, write_volume

from fastpipe import Cache, FastLoader, FastPatchDataset, Rescale, ZScore, stitch
from fastpipe.errors import OptionError, VolumeError
from fastpipe.sampling import Grid, Positions, Uniform
from fastpipe.volumes import normalization, scans

pytestmark = pytest.mark.usefixtures("same_generators", "small_units")

OPTIONS = [
    ZScore(), ZScore(nonzero=True), ZScore(channel_wise=True), ZScore(nonzero=True, channel_wise=True), Rescale(),
    Rescale((-1, 3), channel_wise=True), Rescale(percentiles=(0.5, 99.5)), Rescale((-2, 5), (20, 70), clip=False),
    Rescale((-2, 5), (33, 66), channel_wise=True),
]  # fmt: skip


def normalized(array: Any, option: Any, lead: int = 0) -> Any:
    """Return the whole volume as MONAI's documents define it, with statistics in float64."""
    if option.channel_wise and lead:
        plain = type(option)(**{**option.__dict__, "channel_wise": False})
        return np.stack([normalized(one, plain, lead - 1) if lead == 1 else normalized(one, option, lead - 1)
                         for one in array])  # fmt: skip
    made, numbers = array.astype(np.float32), array.astype(np.float64)
    if isinstance(option, ZScore):
        chosen = numbers != 0 if option.nonzero else np.ones(numbers.shape, bool)
        if chosen.any():
            mean, deviation = numbers[chosen].mean(), numbers[chosen].std()
            made[chosen] = (made[chosen] - np.float32(mean)) / np.float32(deviation or 1.0)
        return made
    low, high = np.percentile(numbers, option.percentiles)
    first, last = map(np.float32, option.to)
    if high == low:
        made = made - np.float32(low) + first
    else:
        made = (made - np.float32(low)) / np.float32(high - low) * np.float32(
            option.to[1] - option.to[0]
        ) + first
    return np.clip(made, first, last) if option.clip else made


def check(found: Any, expected: Any, option: Any) -> None:
    """A mean that is summed in another order may differ by the last bit, and numbers near it by a bit of the mean."""
    assert found.dtype == np.float32 and found.shape == expected.shape
    if isinstance(option, ZScore):
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
    else:
        np.testing.assert_array_equal(found, expected)


KINDS = [
    "array",
    "npy",
    "npy fortran",
    "zarr3 zstd",
    "zarr3 sharded",
    "hdf5 gzip",
    "nii",
    "tiff big-endian",
    "n5 gzip",
]
DTYPES = ["u1", "i1", "u2", "i2", "i4", "f4", "f8"]


@settings(max_examples=50)
@given(
    st.sampled_from(KINDS), st.sampled_from(DTYPES), st.sampled_from(OPTIONS), st.integers(0, 2),
    st.sampled_from(["error", "constant", "edge", "reflect", "wrap"]), st.integers(0, 99),
    st.sampled_from([Cache("ram", 700), Cache("ram", 1 << 20)]),
)  # fmt: skip
def test_patches_are_cut_from_the_normalised_volume(
    kind: str, dtype: str, option: Any, lead: int, mode: str, seed: int, cache: Any
) -> None:
    if kind.startswith("tiff"):
        dtype = {"i1": "u1", "i2": "u2"}.get(dtype, dtype)
    if kind == "n5 gzip" and dtype == "i1":
        dtype = "u1"
    random = np.random.default_rng(seed)
    shape = (*random.integers(1, 4, lead), *random.integers(3, 9, 2))
    array = random_array(shape, dtype, seed) * random.choice([1, 0, -1] if dtype[0] != "u" else [1, 0], shape)
    array = array.astype(dtype)
    patch = tuple(random.integers(1, 4, 2)) if mode == "error" else tuple(random.integers(1, 14, 2))
    low, high = (
        (1 - np.array(patch), np.array(shape[-2:]))
        if mode != "error"
        else (0, np.subtract(shape[-2:], patch) + 1)
    )
    starts = random.integers(low, high, (7, 2))
    padding: Any = ("constant", -2.5) if mode == "constant" else mode
    with tempfile.TemporaryDirectory() as folder:
        path = write_volume(kind, os.path.join(folder, "x"), array, [2] * len(shape))
        dataset = FastPatchDataset(
            path, patch, sampling=Positions(starts), padding=padding, normalize=option, cache=cache, threads=2
        )
        whole = normalized(array, option, lead)
        samples, reference = dataset.__getitems__(range(7)), dataset._stock()
        for index, (start, sample) in enumerate(zip(starts.tolist(), samples, strict=True)):
            check(sample, cut(whole, start, patch, mode, -2.5), option)
            assert equal(dataset[index], sample)
            assert equal(reference[index], sample)
        del dataset, samples, reference


@settings(max_examples=80)
@given(
    st.sampled_from([*DTYPES, "f2", "i8", "u8", "u4", "?"]), st.integers(0, 999), st.floats(0, 99), st.floats(0, 100),
    st.integers(1, 60),
)  # fmt: skip
def test_percentiles_are_those_of_numpy(dtype: str, seed: int, low: float, more: float, size: int) -> None:
    """Numbers of all sizes and signs, many of them equal or close."""
    random, kind = np.random.default_rng(seed), np.dtype(dtype)
    if kind.kind == "f":
        array = (random.normal(size=size) * 10.0 ** random.integers(-4, 4, size)).astype(kind)
        array[random.random(size) < 0.2] = random.choice([0.0, -0.0, 1.0])
    else:
        info = np.iinfo(np.uint8 if dtype == "?" else kind)
        array = (random.integers(info.min, info.max, size, endpoint=True, dtype=info.dtype)).astype(kind)
    high = min(100.0, low + max(more, 1e-3))
    role = FastPatchDataset(array, (1,))._roles[0]
    found = normalization._statistics(Rescale(percentiles=(low, high)), role, 0, 1, "keep")
    expected = np.percentile(array.astype(np.float64), [low, high])
    np.testing.assert_array_equal(np.concatenate(found), expected)


def test_the_extremes_of_whole_volumes_are_those_of_monai() -> None:
    """ScaleIntensity of [[0, 5], [10, 20]], and NormalizeIntensity(nonzero=True) of it: of 5, 10 and 20."""
    array = np.array([[0, 5], [10, 20]], np.int16)
    dataset = FastPatchDataset(array, (1, 2), sampling=Grid(), normalize=Rescale((0, 1)))
    np.testing.assert_array_equal(np.concatenate(list(dataset)), np.float32([[0, 0.25], [0.5, 1]]))
    dataset = FastPatchDataset(array, (2, 2), sampling=Grid(), normalize=ZScore(nonzero=True))
    np.testing.assert_allclose(dataset[0], [[0, -1.069045], [-0.267261, 1.336306]], rtol=1e-5)


@pytest.mark.parametrize("option", OPTIONS, ids=repr)
@pytest.mark.parametrize("value", [0, 7])
def test_volumes_of_one_value(option: Any, value: int) -> None:
    array = np.full((2, 4, 4), value, np.uint8)
    dataset = FastPatchDataset(array, (4, 4), sampling=Grid(), normalize=option)
    np.testing.assert_array_equal(dataset[0], normalized(array, option, 1))
    assert np.isfinite(dataset[0]).all()


# ---- volumes and options that do not fit ----------------------------------------------------------


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e300])
@pytest.mark.parametrize("option", [ZScore(), Rescale(), Rescale(percentiles=(1, 99))], ids=repr)
def test_numbers_without_statistics_are_an_error(value: float, option: Any) -> None:
    array = np.ones((6, 6))
    array[4, 3] = value
    with pytest.raises(VolumeError, match=r"has no statistics for normalize=.* has (NaN; give|.*too large)"):
        FastPatchDataset(array, (2, 2), normalize=option)


@pytest.mark.parametrize("option", OPTIONS, ids=repr)
def test_nan_is_replaced_first(option: Any) -> None:
    array = np.arange(36, dtype=np.float32).reshape(6, 6)
    array[4, 3] = np.nan
    dataset = FastPatchDataset(array, (4, 4), sampling=Grid(2), nan=3, normalize=option, padding="constant")
    expected = normalized(np.where(np.isnan(array), np.float32(3), array), option)
    for index, start in enumerate(dataset.places()[1]):
        check(dataset[index], cut(expected, start, (4, 4)), option)
        assert equal(dataset._stock()[index], dataset[index])
    assert np.isnan(array[4, 3])


@pytest.mark.parametrize("option", ["zscore", 1, ZScore])
def test_other_options_are_refused(option: Any) -> None:
    with pytest.raises(OptionError, match="normalize must be ZScore"):
        FastPatchDataset(np.ones((4, 4)), (2, 2), normalize=option)
    with pytest.raises(OptionError, match="normalize= needs real numbers"):
        FastPatchDataset(np.ones((4, 4), np.complex64), (2, 2), normalize=ZScore())


@pytest.mark.parametrize(
    "options", [{"to": (1, 0)}, {"to": 3}, {"to": (0, np.nan)}, {"percentiles": (50, 50)}, {"percentiles": (-1, 5)},
                {"percentiles": (5, 101)}, {"percentiles": "ab"}, {"to": (0, 1, 2)}, {"to": (0, 1e39)}],
)  # fmt: skip
def test_ranges_that_cannot_work_are_refused(options: Any) -> None:
    with pytest.raises(OptionError, match=r"Rescale\((to|percentiles)=…\) must be two increasing numbers"):
        Rescale(**options)


def test_the_constant_of_padding_is_a_normalised_value() -> None:
    """Bytes cannot hold -3.5, and the patches can."""
    array = np.arange(16, dtype=np.uint8).reshape(4, 4)
    options: Any = {"sampling": Grid(), "padding": ("constant", -3.5)}
    dataset = FastPatchDataset(array, (6, 6), normalize=Rescale(), **options)
    np.testing.assert_array_equal(dataset[0], np.pad(array / np.float32(15), 1, constant_values=-3.5))
    with pytest.raises(OptionError, match="cannot hold"):
        FastPatchDataset(array, (6, 6), **options)
    margins = FastPatchDataset(array, (4, 4), margin=1, normalize=Rescale((1, 2)), sampling=Grid())
    np.testing.assert_array_equal(margins[0], np.pad(array / np.float32(15) + 1, 1))


# ---- every way gives the same -------------------------------------------------------------------


def test_every_loader_gives_the_same_patches(tmp_path: Path) -> None:
    array, labels = random_array((3, 14, 20), "i2", 1), random_array((3, 14, 20), "u1", 2)
    paths = [
        write_volume("zarr3 blosc", tmp_path / str(n), one, (1, 5, 7))
        for n, one in enumerate((array, labels))
    ]
    dataset = FastPatchDataset(
        paths[0],
        (4, 6),
        labels=paths[1],
        sampling=Uniform(11),
        seed=3,
        normalize=ZScore(),
        padding="constant",
    )
    assert "normalised" in repr(dataset) and "ZScore()" in repr(dataset)
    wanted = list(FastLoader(dataset, batch_size=4))
    assert [image.dtype for image, _ in wanted] == [torch.float32] * 3
    loaders: list[Any] = [
        FastLoader(dataset, batch_size=4).reference(), FastLoader(dataset, batch_size=4, num_workers=2, workers="processes")
    ]  # fmt: skip
    for loader in loaders:
        torch.testing.assert_close(list(loader), wanted, rtol=0, atol=0)
    loader = FastLoader(dataset, batch_size=4)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    del iterator
    resumed = FastLoader(dataset, batch_size=4)
    resumed.load_state_dict(state)
    torch.testing.assert_close(list(resumed), wanted[1:], rtol=0, atol=0)
    for image, label in DataLoader(dataset, batch_size=4, num_workers=1):
        assert image.dtype == torch.float32 and label.dtype == torch.uint8
    whole = normalized(array, ZScore())
    for start, image in zip(dataset.places()[1], torch.cat([image for image, _ in wanted]), strict=True):
        check(image.numpy(), cut(whole, start, (4, 6)), ZScore())


def test_transforms_get_normalised_patches() -> None:
    array = np.arange(16, dtype=np.uint8).reshape(4, 4)
    dataset = FastPatchDataset(
        array, (4, 4), sampling=Grid(), normalize=Rescale(), transform=lambda one: one + 1
    )
    np.testing.assert_array_equal(dataset[0], array / np.float32(15) + 1)


def test_stitched_patches_are_the_normalised_volume() -> None:
    array = random_array((12, 9), "i2", 4)
    dataset = FastPatchDataset(array, (4, 4), sampling=Grid(2), normalize=ZScore())
    made = stitch(FastLoader(dataset, 3), dataset, np.empty((12, 9), np.float32), weights="constant")
    np.testing.assert_allclose(made, normalized(array, ZScore()), rtol=1e-5, atol=1e-6)


# ---- statistics are computed once -----------------------------------------------------------------


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The volumes that were gone through."""
    found: list[str] = []

    def scan(roles: Any, number: int, look: Any) -> None:
        found.append(os.path.basename(roles[0].volumes[number].name))
        scans.scan(roles, number, look)

    monkeypatch.setattr(normalization, "scan", scan)
    return found


@pytest.mark.usefixtures("later")
def test_statistics_are_kept_until_the_volume_changes(tmp_path: Path, passes: list[str]) -> None:
    path, array = tmp_path / "x.npy", random_array((8, 8), "f4")
    np.save(path, array)

    def patch(option: Any, **options: Any) -> Any:
        return FastPatchDataset(path, (8, 8), sampling=Grid(), normalize=option, **options)[0]

    for option in (ZScore(), ZScore(nonzero=True), Rescale(), Rescale((2, 3)), Rescale(percentiles=(1, 99))):
        first = patch(option)
        assert equal(patch(option), first)
        check(first, normalized(array, option), option)
    # Another range needs the same percentiles; those between the ends take two passes over 32 bits.
    assert passes == ["x.npy"] * 5
    patch(ZScore(), nan=0)  # statistics without NaN are others
    assert len(passes) == 6
    np.save(path, array * 2 + 1)
    check(patch(Rescale()), normalized(array * 2 + 1, Rescale()), Rescale())
    assert len(passes) == 7
    patch(Rescale((0, 5)), cache="off")  # keeps nothing, and uses nothing that is kept
    assert len(passes) == 8


@pytest.mark.usefixtures("later")
def test_each_volume_has_its_own_statistics(tmp_path: Path, passes: list[str]) -> None:
    arrays = [random_array((8, 8), "i2", seed) * (seed + 1) for seed in range(3)]
    for number, array in enumerate(arrays):
        np.save(tmp_path / f"{number}.npy", array)
    for _ in range(2):
        dataset = FastPatchDataset(str(tmp_path / "*.npy"), (8, 8), sampling=Grid(), normalize=Rescale())
        for array, patch in zip(arrays, dataset, strict=True):
            np.testing.assert_array_equal(patch, normalized(array, Rescale()))
    assert passes == ["0.npy", "1.npy", "2.npy"]


def test_memory_for_statistics_is_bounded() -> None:
    array = np.random.default_rng(0).normal(size=(128, 256, 256)).astype(np.float32)  # 32 MiB
    for option in (ZScore(), Rescale(percentiles=(0.5, 99.5))):
        tracemalloc.start()
        try:
            dataset = FastPatchDataset(array, (16, 16, 16), normalize=option, sampling=Positions([[0, 0, 0]]))
            assert tracemalloc.get_traced_memory()[1] < 64 << 20
        finally:
            tracemalloc.stop()
        check(dataset[0], normalized(array, option)[:16, :16, :16], option)


def test_a_damaged_part_is_an_error_like_the_patch(tmp_path: Path) -> None:
    path = write_volume("zarr3 zstd", tmp_path / "x", random_array((8, 8), "i2"), (4, 4))
    dataset = FastPatchDataset(
        path, (4, 4), sampling=Grid(), normalize=Rescale(), bad_samples="skip", cache="off"
    )
    chunk = next(file for file in Path(path).rglob("*") if file.is_file() and file.name != "zarr.json")
    chunk.write_bytes(b"\0" * 5)
    assert sum(len(batch) for batch in FastLoader(dataset, 2)) == 3
    with pytest.raises(VolumeError, match="chunk"):
        FastPatchDataset(path, (4, 4), normalize=Rescale(), cache="off")
