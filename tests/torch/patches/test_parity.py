"""Patches are what NumPy cuts from the whole array: any kind of volume, shape, chunk, dtype, patch and border."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from volume_kinds import cut, equal, random_array, write_volume

from fastpipe import Cache, FastPatchDataset
from fastpipe.sampling import Grid, Positions, Uniform

pytestmark = pytest.mark.usefixtures("same_generators", "small_units")

# Kinds that hold arrays of 1 to 4 dimensions and any usual dtype.
CHUNKED = [
    "zarr3 blosc", "zarr3 bitshuffle", "zarr3 zstd", "zarr3 gzip", "zarr3 none", "zarr3 big-endian", "zarr2 blosc",
    "zarr2 zstd", "zarr2 zlib", "zarr2 none", "hdf5 gzip", "hdf5 lzf", "hdf5 chunks", "b2nd",
]  # fmt: skip
PLAIN = ["hdf5 contiguous", "npy", "npy fortran", "array"]
SLOWER = ["zarr3 sharded", "zarr2 fortran", "n5 gzip", "n5 raw"]
PAGED = ["tiff tiles", "tiff strips", "tiff raw", "tiff big-endian", "tiff big-endian tiles", "tiff raw tiles",
         "bigtiff", "tiff folder", "tiff folder zlib"]  # fmt: skip
DTYPES = ["u1", "i1", "u2", "i2", "i4", "i8", "f4", "f8"]
CACHES = [Cache("ram", 1), Cache("ram", 700), Cache("ram", 20_000), Cache("off"), Cache("ram", 1 << 20)]


MODES = ["constant", "edge", "reflect", "symmetric", "wrap"]


@st.composite
def cases(draw: st.DrawFn, kinds: Sequence[str], dims: tuple[int, int], dtypes: Sequence[str]) -> Any:
    """How an array is stored, its shape, chunks and dtype, and patches of it, with padding perhaps larger ones."""
    count, mode = draw(st.integers(*dims)), draw(st.sampled_from(["error"] * 5 + MODES))
    most = (40, 30, 17, 9)[count - 1] if mode == "error" else 8
    shape = tuple(draw(st.integers(1 if dims[0] == 1 else 2, most)) for _ in range(count))
    chunk = tuple(draw(st.integers(1, size + 1)) for size in shape)
    inner = shape[draw(st.integers(0, count - 1)) :]
    patch = tuple(draw(st.integers(1, size if mode == "error" else 20)) for size in inner)
    return (
        draw(st.sampled_from(kinds)), shape, chunk, draw(st.sampled_from(dtypes)), patch, mode,
        draw(st.sampled_from(CACHES)), draw(st.integers(0, 99)), draw(st.booleans()),
    )  # fmt: skip


def check(case: Any) -> None:
    kind, shape, chunk, dtype, patch, mode, cache, seed, in_batches = case
    if kind == "nii.gz" and cache.where == "off":  # which leaves no place for a copy
        cache = Cache("ram", 1)
    array = random_array(shape, dtype, seed)
    starts = corners(shape[len(shape) - len(patch) :], patch, mode != "error", seed)
    with tempfile.TemporaryDirectory() as folder:
        path = write_volume(kind, os.path.join(folder, "x"), array, chunk)
        options: Any = {"padding": mode, "cache": cache, "threads": 2}
        dataset = FastPatchDataset(path, patch, sampling=Positions(starts), **options)
        samples = dataset.__getitems__(range(len(starts))) if in_batches else list(dataset)
        reference = dataset._stock()
        for index, (start, sample) in enumerate(zip(starts.tolist(), samples, strict=True)):
            assert equal(sample, cut(array, start, patch, mode)), f"{case} at {start}"
            assert index > 3 or equal(reference[index], sample), f"{case} at {start}"
        del dataset, samples, reference


def corners(shape: Sequence[int], patch: Sequence[int], is_beyond: bool, seed: int) -> Any:
    """Where patches begin: at the ends of the volume, or with a voxel of it, and in between."""
    random, sides, sizes = np.random.default_rng(seed), np.array(patch), np.array(shape)
    low, high = (1 - sides, sizes - 1) if is_beyond else (0 * sides, sizes - sides)
    ends = list(itertools.product(*({first, last} for first, last in zip(low, high, strict=True))))[:9]
    return np.array([*ends, *(random.integers(low, high + 1) for _ in range(9))])


# Kinds, their numbers of dimensions and types, and how many examples are tried.
GROUPS: dict[str, Any] = {
    "chunks": (CHUNKED, (1, 4), DTYPES, 30),
    "as they are": (PLAIN, (1, 4), [*DTYPES, ">i2", ">f4", "c8", "f2", "?", "u8"], 30),
    "tensorstore": (SLOWER, (1, 4), ["u1", "i2", "f4"], 15),
    "pages of TIFF": (PAGED, (3, 3), ["u1", "u2", "i4", "f4"], 20),
    "NIfTI": (["nii", "nii.gz"], (3, 4), ["u1", "i2", "f4", "f8"], 10),
    "DICOM": (["dicom"], (3, 3), ["u1", "i1", "u2", "i2", "i4"], 10),
    "a filter of the library alone": (["hdf5 scale-offset"], (1, 3), ["u1", "i2", "i4"], 10),
}


AT_LENGTH = [pytest.mark.slow, pytest.mark.hang_after(900)]


@pytest.mark.parametrize(
    "group", [*GROUPS, *(pytest.param(one, marks=AT_LENGTH, id=f"{one}, at length") for one in GROUPS)]
)
def test_patches_are_slices_of_the_whole_array(group: str) -> None:
    """As ``numpy.pad`` gives it, where they reach beyond."""
    *kinds, examples = GROUPS[group]

    @settings(max_examples=max(examples, settings().max_examples if settings().max_examples > 100 else 0))
    @given(case=cases(*kinds))
    def patches_are_slices(case: Any) -> None:
        check(case)

    patches_are_slices()


@st.composite
def together(draw: st.DrawFn) -> Any:
    """A shape, and for each of volume, labels and mask a kind, chunks, a dtype, and channels in front."""
    shape = tuple(draw(st.integers(3, 14)) for _ in range(draw(st.integers(2, 3))))
    roles = []
    for kinds in (CHUNKED + PLAIN, CHUNKED + PLAIN, ["array", "zarr3 blosc", "hdf5 gzip"]):
        lead = tuple(draw(st.lists(st.integers(1, 3), max_size=1)))
        chunk = tuple(draw(st.integers(1, size)) for size in (*lead, *shape))
        roles.append((draw(st.sampled_from(kinds)), lead, chunk, draw(st.sampled_from(["u1", "i2", "f4"]))))
    patch = tuple(draw(st.integers(1, size)) for size in shape)
    return shape, roles, patch, draw(st.sampled_from(CACHES)), draw(st.integers(0, 99))


@settings(max_examples=25)
@given(case=together())
def test_labels_and_mask_are_cut_at_the_same_places(case: Any) -> None:
    shape, roles, patch, cache, seed = case
    with tempfile.TemporaryDirectory() as folder:
        arrays = [random_array((*lead, *shape), dtype, seed + 1) for _, lead, _, dtype in roles]
        paths = [
            write_volume(kind, os.path.join(folder, str(number)), array, chunk)
            for number, ((kind, _, chunk, _), array) in enumerate(zip(roles, arrays, strict=True))
        ]
        dataset = FastPatchDataset(
            paths[0], patch, labels=paths[1], mask=paths[2], sampling=Uniform(12), seed=seed, cache=cache,
            threads=2,
        )  # fmt: skip
        batches = dataset.batch_sampler(5, shuffle=True)
        _, starts = dataset.places()
        for indices in batches:
            for index, sample in zip(indices, dataset.__getitems__(indices), strict=True):
                assert isinstance(sample, tuple)
                for array, value in zip(arrays, sample, strict=True):
                    assert equal(value, cut(array, starts[index].tolist(), patch))
        del dataset, sample, value


@pytest.mark.parametrize(
    ("sampling", "rows", "columns"), [(Grid(stride=(3, 2)), (0, 3, 6), (0, 2, 4)), (Grid(), (0, 4, 6), (0, 3, 4))]
)  # fmt: skip
def test_a_grid_covers_the_volume_and_its_last_patch_moves_in(sampling: Any, rows: Any, columns: Any) -> None:
    volumes, starts = FastPatchDataset(np.zeros((10, 7)), (4, 3), sampling=sampling).places()
    assert (volumes == 0).all()
    assert [tuple(start) for start in starts.tolist()] == list(itertools.product(rows, columns))


def test_uniform_places_are_as_likely_as_each_other() -> None:
    dataset = FastPatchDataset(np.zeros((7, 5), "u1"), (4, 3), sampling=Uniform(12_000), seed=5)
    _, starts = dataset.places()
    counts = np.zeros((4, 3))
    np.add.at(counts, tuple(starts.T), 1)
    assert ((counts - 1000) ** 2 / 1000).sum() < 34  # 11 degrees of freedom: 99.96 % are below


@pytest.mark.parametrize("by", ["equal", "size"])
def test_volumes_are_taken_equally_or_by_their_places(by: Any) -> None:
    volumes = [np.zeros((4, 4), "u1"), np.zeros((4, 12), "u1"), np.zeros((12, 4), "u1")]
    dataset = FastPatchDataset(volumes, (4, 4), sampling=Uniform(9000, volumes=by), seed=1)
    counts = np.bincount(dataset.places()[0], minlength=3) / 9000
    expected = [1 / 3] * 3 if by == "equal" else [1 / 19, 9 / 19, 9 / 19]
    np.testing.assert_allclose(counts, expected, atol=0.02)
    assert not np.array_equal(dataset.places(0)[1], dataset.places(1)[1])
