"""Loaders of fastpipe's in a loader's place: they read the same files, and are measured on them."""

from __future__ import annotations

import inspect
import itertools
import logging
import os
import select
import tempfile
from collections import namedtuple
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import nibabel
import numpy as np
import pytest
import torch
import zarr
from PIL import Image
from pytest import MonkeyPatch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, Subset
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import default_loader
from torchvision.transforms import v2

import fastpipe
from fastpipe import Cache, FastHDF5Dataset, FastImageFolder, FastLoader
from fastpipe.tools import candidates, swaps, witness
from fastpipe.tools.costs import LoaderCosts
from fastpipe.tools.folders import FileSystem
from fastpipe.tools.loaders import Watched
from fastpipe.tools.loops import Loop
from fastpipe.tools.stacks import Line
from fastpipe.tools.thread_times import Spent
from fastpipe.tools.witness import ArrayRead, OpenVolume, Reads, observe, volumes_of

Pair = namedtuple("Pair", "image label")
V1 = v1.Compose([v1.RandomResizedCrop(32), v1.RandomHorizontalFlip(), v1.ToTensor()])
V2 = v2.Compose([v2.ToImage(), v2.RandomResizedCrop(32), v2.ToDtype(torch.float32, scale=True)])


def advice_of(loader: Any, name: str, **options: Any) -> list[Any]:
    report = fastpipe.profile(loader, lambda batch: None, seconds=0.6, **options)
    assert report.is_loader_bound
    return [advice for advice in report.advice if name in advice.what]


def watched(loader: Any, batch: Any = None) -> Watched:
    line, loop = Line("train.py", 3, "main"), Loop(1.0, True)
    loop.batch = batch
    return Watched(loader, line, line, loop)


class HuggingFaceLike(Dataset[Any]):
    def cast_column(self, name: str, feature: Any) -> HuggingFaceLike:
        return self

    def __len__(self) -> int:
        return 8


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


@pytest.mark.parametrize(
    ("loader", "said"),
    [
        (DataLoader(HuggingFaceLike()), "FastImageFolder.from_samples(samples, transform)"),
        (DataLoader(Stream()), "An IterableDataset stays with torch"),
        (DataLoader(range(8)), ""), (fastpipe.FastLoader(Stream()), ""), ([1, 2], ""),
    ],
    ids=["Hugging Face", "a stream", "a sequence", "a FastLoader", "a list"],
)  # fmt: skip
def test_a_hint_is_given_for_kinds_that_are_not_replaced(loader: Any, said: str) -> None:
    assert said in swaps.hint_of(watched(loader)) and bool(swaps.hint_of(watched(loader))) == bool(said)


@pytest.fixture
def getitem(monkeypatch: MonkeyPatch) -> Callable[..., Any]:
    """h5py's own function, also where an earlier profile was interrupted and has left an observer."""
    function = h5py.Dataset.__getitem__
    function = inspect.unwrap(function, stop=lambda one: not hasattr(one, "_fastpipe_observers"))
    monkeypatch.setattr(h5py.Dataset, "__getitem__", function)
    return h5py.Dataset.__getitem__


class Rows(Dataset[Any]):  # of an HDF5 file that each process opens, one by one
    def __init__(self, path: Path, work: int = 0, scale: float = 1.0) -> None:
        self.path, self.work, self.scale, self.file = str(path), work, scale, None

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> Any:
        if self.file is None:
            self.file = h5py.File(self.path)
        row = torch.from_numpy(self.file["x"][index])
        for _ in range(self.work):
            row = row + np.sin(np.arange(20_000.0)).sum() * 0
        return row * self.scale, int(self.file["y"][index])


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    with h5py.File(tmp_path / "rows.h5", "w") as file:
        values = np.random.default_rng(0).normal(size=(512, 32, 32)).astype("f4")
        file.create_dataset("x", data=values, chunks=(64, 32, 32), compression="gzip")
        file["y"] = np.arange(512)
    return tmp_path / "rows.h5"


@pytest.fixture
def without_other_work(monkeypatch: MonkeyPatch) -> None:
    """Count a dataset's other work as little, also where a busy machine interrupts it."""
    monkeypatch.setattr(swaps, "_MUCH", 1.0)


@pytest.mark.few(1)
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.usefixtures("without_other_work", "without_least_gain")
def test_rows_of_an_hdf5_file_are_read_by_fastpipe(
    rows: Path, workers: int, getitem: Any, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.chdir(rows.parents[1])  # from where the advice names the file
    loader = DataLoader(Rows(rows), batch_size=16, shuffle=True, num_workers=workers)
    report = fastpipe.profile(loader, lambda batch: None, seconds=0.6, try_advice=True)
    first = report.advice[0]
    assert report.stall[0].name == "read"
    assert f"FastHDF5Dataset('{rows.parent.name}/rows.h5', ['x', 'y'])" in first.what
    assert "transform=" not in first.what and "augment=" not in first.what
    assert first.predicted_s is not None and first.tried_s is not None
    assert h5py.Dataset.__getitem__ is getitem


@pytest.mark.usefixtures("without_other_work", "without_least_gain")
def test_a_dataset_that_changes_its_rows_is_not_replaced_by_one_that_only_reads(rows: Path) -> None:
    dataset = Rows(rows, scale=2.0)
    loader = DataLoader(dataset, batch_size=16, shuffle=True)
    (advice,) = advice_of(loader, "FastHDF5Dataset", try_advice=True)
    assert (
        advice.what.split(" (")[0].endswith("and FastLoader")
        and "dataset's other work as transform=" in advice.what
    )
    assert "whose samples differ from those of the script's dataset" in advice.why and advice.tried_s is None
    other = FastHDF5Dataset(rows, ["x", "y"])
    fresh = Rows(rows)
    assert swaps._have_same_samples(fresh, other) and fresh.file is None, (
        "the file is not opened in this process"
    )


@pytest.mark.usefixtures("without_least_gain")
def test_other_work_of_a_dataset_of_rows_is_counted_as_transform_and_left_out_as_augment(rows: Path) -> None:
    loader = DataLoader(Rows(rows, work=3), batch_size=16, shuffle=True)
    whole, as_it_is = advice_of(loader, "FastHDF5Dataset")
    assert "augment=" in whole.what and "transform=" in as_it_is.what
    assert whole.predicted_s < as_it_is.predicted_s and "Rows.__getitem__" in whole.why


@pytest.mark.slow
def test_reads_of_two_loaders_are_observed_until_there_are_enough(rows: Path, getitem: Any) -> None:
    with fastpipe.profile():
        one, other = DataLoader(Rows(rows), batch_size=16), DataLoader(Rows(rows), batch_size=16)
        for number, _ in enumerate(zip(one, other, strict=True), start=1):
            # Each has seen enough after 256 reads: the one that began first ends first.
            assert number > 1 or h5py.Dataset.__getitem__ is not getitem
    assert h5py.Dataset.__getitem__ is getitem
    with h5py.File(rows) as file, closing(Reads().begin()) as reads:
        for number in range(300):
            file["x"][number], file["y"][number]
        assert h5py.Dataset.__getitem__ is getitem
        file["x"][3:5, 0]
    path = str(rows.resolve())
    assert reads.arrays == [ArrayRead(path, "/x", (512, 32, 32), (32, 32)), ArrayRead(path, "/y", (512,), ())]
    assert [read.sample_dims for read in reads.arrays] == [1, 1]
    assert ArrayRead("f", "/x", (8, 4), (3, 4)).sample_dims is None


class Patches(Dataset[Any]):  # of a volume at random, or of volumes that are loaded for each sample
    def __init__(self, folder: Path, files: list[tuple[str, str]] = []) -> None:  # noqa: B006
        self.files = files
        if not files:
            self.image, self.labels = zarr.open_array(folder / "image"), zarr.open_array(folder / "labels")

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> Any:
        if not self.files:
            box = tuple(slice(at, at + 8) for at in torch.randint(24, (3,)).tolist())
            return self.image[box], self.labels[box]
        image, labels = (nibabel.load(file).get_fdata() for file in self.files[index % len(self.files)])
        return image[None, 4:12, 8:16, :8], labels[4:12, 8:16, :8]


@pytest.mark.slow
def test_patches_of_a_volume_are_read_by_fastpipe(tmp_path: Path) -> None:
    for name, dtype in (("image", "f4"), ("labels", "u1")):
        array = zarr.create_array(tmp_path / name, shape=(32, 32, 32), chunks=(16, 16, 16), dtype=dtype)
        array[:] = np.random.default_rng(0).integers(0, 9, (32, 32, 32))
    loader = DataLoader(Patches(tmp_path), batch_size=4, num_workers=1, multiprocessing_context="spawn")
    first = advice_of(loader, "FastPatchDataset('image', (8, 8, 8), labels='labels')", try_advice=True)[0]
    assert first.predicted_s is not None and first.tried_s is not None


def test_volumes_of_a_group_are_known_by_what_is_read_of_them(tmp_path: Path) -> None:
    """A script may keep the group, and take an array of it for each sample."""
    group, read = zarr.open_group(tmp_path, mode="w"), zarr.Array.__getitem__
    for name, shape in (("other", (8, 8, 8)), ("image", (8, 8, 8)), ("labels", (8, 8, 8)), ("table", (8, 8))):
        group.create_array(name, shape=shape, dtype="u1")
    with closing(Reads().begin()) as reads:
        for name in ("image", "labels", "table") * 200:
            group[name][2:4]
        assert zarr.Array.__getitem__ is read  # enough was seen
    assert reads.volumes == [OpenVolume(str(tmp_path / name), (8, 8, 8)) for name in ("image", "labels")]


@pytest.mark.few(1)
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.usefixtures("without_least_gain")
def test_patches_of_volumes_that_are_loaded_are_read_by_fastpipe(tmp_path: Path, workers: int) -> None:
    values = np.random.default_rng(0).integers(0, 9, (64, 64, 48)).astype(np.int16)
    files = [(str(tmp_path / f"{case}.nii.gz"), str(tmp_path / f"{case}-labels.nii.gz")) for case in range(2)]
    for name in itertools.chain(*files):
        nibabel.save(nibabel.Nifti1Image(values, np.eye(4)), name)
    load = nibabel.load
    loader = DataLoader(Patches(tmp_path, files), batch_size=4, num_workers=workers)
    first = advice_of(loader, "FastPatchDataset([('0.nii.gz', '0-labels.nii.gz'), …], (8, 8, 8))")[0]
    assert nibabel.load is load and first.predicted_s is not None


def test_samples_that_are_whole_volumes_or_arrays_without_a_file_are_no_patches(tmp_path: Path) -> None:
    whole = watched(DataLoader(range(4), batch_size=2), [torch.zeros(2, 16, 16, 16)])
    assert not list(swaps.of_volumes(whole, LoaderCosts(), [OpenVolume("/x.npy", (16, 16, 20), True)]))
    memory = zarr.create_array(zarr.storage.MemoryStore(), shape=(4,), dtype="u1")
    assert volumes_of(SimpleNamespace(memory=memory, array=np.zeros((4, 4)))) == [] and volumes_of(3) == []
    np.save(tmp_path / "flat.npy", np.zeros((4, 4)))
    np.save(tmp_path / "x.npy", np.zeros((4, 4, 4)))
    load = np.load
    with closing(Reads().begin()) as loads:
        np.load(tmp_path / "flat.npy"), np.load(tmp_path / "x.npy"), np.load(tmp_path / "x.npy")
        with (tmp_path / "x.npy").open("rb") as file:
            np.load(file)
        with pytest.raises(FileNotFoundError):
            np.load(tmp_path / "none.npy")
        for _ in range(600):
            np.load(tmp_path / "flat.npy")
        assert np.load is load  # enough was seen
    assert loads.volumes == [OpenVolume(str(tmp_path / "x.npy"), (4, 4, 4), True)]


def open_image(path: str) -> Any:
    with Image.open(path) as image:
        return image.convert("RGB")


class Photos(Dataset[Any]):
    def __init__(self, table: Any, tfm: Any = V1, form: Any = Pair, load: Any = open_image) -> None:
        self.table, self.tfm, self.form, self.load = table, tfm, form, load

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> Any:
        path, label = self.table[index]
        return self.form(self.tfm(self.load(path)), label)


@pytest.fixture
def table(photo_tree: Path) -> list[tuple[str, int]]:
    return [(str(path), number % 3) for number, path in enumerate(sorted(photo_tree.rglob("*.jpg")) * 4)]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("form", "image_of", "workers", "tfm", "load"),
    [
        pytest.param(lambda *pair: pair, lambda batch: batch[0], 0, V1, open_image, id="pair"),
        pytest.param(lambda x, y: {"label": y, "image": x}, lambda batch: batch["image"], 1, V2,
                     default_loader, id="dict"),
        pytest.param(lambda x, y: ([y, {"x": x}], "name"), lambda batch: batch[0][1]["x"], 0, V1, open_image,
                     id="nested"),
        pytest.param(Pair, lambda batch: batch.image, 0, V1, open_image, id="named"),
        pytest.param(lambda x, y: x, lambda batch: batch, 0, V2, open_image, id="alone"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("without_least_gain")
def test_images_of_a_table_are_read_by_fastpipe(
    table: list[tuple[str, int]], form: Any, image_of: Any, workers: int, tfm: Any, load: Any
) -> None:
    function, seen = Image.open, []
    loader = DataLoader(Photos(table, tfm, form, load), batch_size=8, shuffle=True, num_workers=workers)
    report = fastpipe.profile(loader, seen.append, seconds=0.6, try_advice=True)
    assert Image.open is function
    (way,) = [advice for advice in report.advice if "from_samples" in advice.what]
    assert way.predicted_s is not None and way.predicted_s > 0 and way.tried_s is not None
    assert "of your images" in way.why and "your transform" in way.why
    assert len({type(batch) for batch in seen}) == 1
    assert {(image.shape[1:], image.dtype) for image in map(image_of, seen)} == {((3, 32, 32), torch.float32)}


class Twice(Photos):  # two images for a sample
    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index), super().__getitem__(index - 1)


def with_other(dataset: Any, **more: Any) -> Any:
    vars(dataset).update(other=V2, **more)
    return dataset


RECOGNISED: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "subset": (lambda table: Subset(Photos(table), range(64)), True),
    "batch sampler": (Photos, True),
    "two transforms, one by its name": (lambda table: with_other(Photos(table), transform=V1), True),
    "two transforms": (lambda table: with_other(Photos(table)), False),
    "two images": (Twice, False),
    "grey images": (lambda table: Photos(table, load=lambda path: Image.open(path).convert("L")), False),
    "own transform": (
        lambda table: Photos(table, lambda one: torch.from_numpy(np.array(one.resize((32, 32))))), False
    ),
}  # fmt: skip


@pytest.mark.few(2)
@pytest.mark.parametrize("case", RECOGNISED)
@pytest.mark.usefixtures("without_least_gain")
def test_images_of_a_table_are_recognised(table: list[tuple[str, int]], case: str) -> None:
    make, is_advised = RECOGNISED[case]
    sampler = BatchSampler(RandomSampler(table), 8, False)
    how: Any = {"batch_sampler": sampler} if case == "batch sampler" else {"batch_size": 8}
    assert bool(advice_of(DataLoader(make(table), **how), "from_samples")) == is_advised


def test_opened_images_are_observed_in_all_threads_with_their_boxes_and_sizes(table: Any) -> None:
    functions = Image.open, Image.Image.crop, Image.Image.resize
    paths = sorted({path for path, _ in table})

    def read(number: int) -> None:
        with Image.open(fp=paths[number]) as image:
            image.crop(box=(number, 0, 20 + number, 20)).resize(size=(8, 8)).resize((4, 4))

    with closing(Reads().begin()) as reads, ThreadPoolExecutor(2) as pool:
        reads.begin()  # again
        list(pool.map(read, range(4)))
        with open(paths[0], "rb") as file:
            Image.open(file)
        with pytest.raises(FileNotFoundError):
            Image.open("nowhere.png")
    assert (Image.open, Image.Image.crop, Image.Image.resize) == functions
    assert reads.opened == 5 and reads.images.pop().file == paths[0]
    found = {one.file: (one.box, one.size) for one in reads.images}
    assert found == {path: ((at, 0, 20 + at, 20), (8, 8)) for at, path in enumerate(paths[:4])}


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_an_observed_function_is_restored_in_whatever_order_observers_end(order: tuple[int, ...]) -> None:
    owner, seen = SimpleNamespace(double=lambda number: 2 * number), []
    before = owner.double
    ends = [observe(owner, "double", lambda value, number, by=by: seen.append(by)) for by in range(3)]
    for left, at in zip((3, 2, 1), order, strict=True):
        seen.clear()
        assert owner.double(4) == 8 and len(seen) == left
        ends[at]()
        ends[at]()
    assert owner.double is before
    end = observe(owner, "double", lambda value, number: seen.append(value))
    inner = owner.double
    owner.double = other = lambda number: inner(number) + 1
    seen.clear()
    end()
    assert owner.double is other and owner.double(4) == 9 and not seen, "another package's replacement stays"


def test_an_error_of_an_observer_is_no_error_of_the_caller(caplog: pytest.LogCaptureFixture) -> None:
    owner, seen = SimpleNamespace(double=lambda number: 2 * number), []

    def fail(value: int, number: int) -> None:
        seen.append(value)
        raise ValueError("not today")

    end = observe(owner, "double", fail)
    with caplog.at_level(logging.WARNING, "fastpipe"):
        assert [owner.double(4), owner.double(5)] == [8, 10]
    assert seen == [8] and "not today" in caplog.text
    end()
    assert "_fastpipe_observers" not in vars(owner.double)


@pytest.mark.parametrize("calls_before", list(itertools.combinations_with_replacement(range(4), 3)))
@pytest.mark.parametrize("moment", ["begin", "end"])
def test_an_image_that_is_read_while_observing_begins_or_ends_is_seen_whole_or_not(
    moment: str, calls_before: tuple[int, ...], tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "x.png")
    images: list[Image.Image] = []
    calls = (
        lambda: Image.open(tmp_path / "x.png"), lambda: images[-1].crop((0, 0, 4, 4)),
        lambda: images[-1].resize((2, 2)),
    )  # fmt: skip

    def read_on(wanted: int) -> None:
        """As another thread would, between any two functions that are observed."""
        while len(images) < wanted:
            images.append(calls[len(images)]())

    reads, steps = Reads(), iter([*calls_before, 3])

    def observe_and_read(*args: Any) -> Any:
        if args[0] not in (Image, Image.Image):
            return observe(*args)
        if moment == "begin":
            read_on(next(steps))
        end = observe(*args)
        return (lambda: (read_on(next(steps)), end())) if moment == "end" else end

    monkeypatch.setattr(witness, "observe", observe_and_read)
    with closing(reads.begin()):
        if moment == "begin":
            read_on(next(steps))
    read_on(3)
    for read in reads.images:
        assert read.size is None or (read.box, read.size) == ((0, 0, 4, 4), (2, 2))


WAITING = LoaderCosts({"read": Spent(9_000_000, 0, 0), "decode": Spent(1_000_000, 1_000_000, 0)}, batches=4)
WORKING = LoaderCosts({"read": Spent(9_000_000, 9_000_000, 0)}, batches=4)


def far_loader(path: str) -> Any:
    """Reads as from a mount whose server answers late; copies are near."""
    if "fastpipe-profile-" not in path:
        select.select([], [], [], 0.01)
    return default_loader(path)


def staged(loader: Any, folder: Path, kind: str = "fuse.s3fs", costs: LoaderCosts = WAITING) -> list[Any]:
    device = os.stat(folder).st_dev
    mounts = f"30 23 {os.major(device)}:{os.minor(device)} / {folder} rw - {kind} bucket rw\n"
    return list(swaps.of_staged(watched(loader), costs, mounts))


@pytest.fixture
def made(monkeypatch: MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where copies are made."""
    folder = tmp_path_factory.mktemp("made")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_a_folder_on_a_mount_is_measured_on_copies_that_are_removed(
    photo_tree: Path, made: Path, monkeypatch: MonkeyPatch
) -> None:
    dataset = ImageFolder(str(photo_tree), v1.ToTensor(), loader=far_loader)
    loader = DataLoader(dataset, batch_size=1, shuffle=True)
    (found,) = staged(loader, photo_tree)
    assert found.what.endswith("FastLoader (train.py:3 main)") and 'stage="/a/local/disk"' in found.what
    assert "90% of its time waiting for fuse.s3fs" in found.why
    originals = {image.numpy().tobytes(): label for image, label in dataset}
    for _ in range(2):
        epoch = list(found.begin())
        assert len(epoch) == len(list(made.glob("*/*.jpg"))) == 8
        assert all(originals[images[0].numpy().tobytes()] == labels.item() for images, labels in epoch)
    found.close()
    assert not list(made.iterdir())
    assert dataset.samples[0][0].startswith(str(photo_tree)) and loader.dataset is dataset
    assert not staged(loader, photo_tree, "ext4") and not staged(loader, photo_tree, costs=WORKING)
    assert not list(swaps.of_staged(watched(DataLoader(range(10), batch_size=2)), WAITING))
    monkeypatch.setattr(swaps, "_MOST_BYTES", 10)
    (found,) = staged(DataLoader(dataset, batch_size=2), photo_tree, "nfs4")
    with pytest.raises(OSError, match=r"no room for 2 files in .*: .* are free"):
        next(found.begin())
    found.close()
    assert not list(made.iterdir())


@pytest.mark.slow
def test_a_profile_of_a_mount_advises_to_copy(photo_tree: Path, made: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(swaps, "file_system", lambda path, mounts: FileSystem("fuse.rclone", 1 << 40))
    dataset = ImageFolder(str(photo_tree), V1, loader=far_loader)
    dataset.samples = dataset.imgs = dataset.samples * 20
    (found,) = advice_of(DataLoader(dataset, batch_size=4), "stage=", try_advice=True)
    assert found.predicted_s is not None and not list(made.iterdir())


def kept(loader: Any) -> list[Any]:
    return list(candidates.of_kept(watched(loader)))


def test_data_are_kept_in_a_cache_of_a_copy_of_the_dataset(photo_tree: Path, rows: Path) -> None:
    transform = v1.Compose([v1.Resize((8, 8)), v1.ToTensor()])
    images = FastImageFolder(photo_tree, transform, cache="off")
    (found,) = kept(FastLoader(images, 4, shuffle=True))
    assert found.what.startswith("cache=Cache(where='ram', max_bytes=")
    assert found.what.endswith(" of the FastImageFolder (train.py:3 main)")
    expected = {image.numpy().tobytes() for image, _ in images}
    for _ in range(2):
        made = torch.cat([batch for batch, _ in found.begin()])
        assert {image.numpy().tobytes() for image in made} == expected
    table = FastHDF5Dataset(rows, "y", cache="off")
    (found,) = kept(FastLoader(table, 4))
    for _ in range(2):
        assert sorted(torch.cat(list(found.begin())).tolist()) == list(range(64))  # of sixteen batches
    assert images.cache == table.cache == Cache("off")


def test_a_cache_is_proposed_only_where_it_holds_all_and_none_does_so_already(
    rows: Path, monkeypatch: MonkeyPatch
) -> None:
    def dataset(cache: Any = "off") -> FastHDF5Dataset:
        return FastHDF5Dataset(rows, "x", cache=cache)

    for cache in ("auto", "ram", "disk", Cache("ram", 4 << 20)):
        assert not kept(FastLoader(dataset(cache), 4))
    assert kept(FastLoader(dataset(Cache("ram", max_bytes=1000)), 4))
    assert not kept(FastLoader(Subset(dataset(), [0, 1]), 2)) and not kept(FastLoader(list(range(8)), 2))
    for free in (None, 2 << 20):
        monkeypatch.setattr(candidates, "free_memory", lambda: free)
        assert not kept(FastLoader(dataset(), 4))
