"""Lightning, Accelerate and timm: the loader stays itself, ranks share an epoch, resuming is exact."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler
from torchvision import transforms as v1

from fastpipe import FastImageFolder, FastLoader, Shard
from fastpipe.bench.synthetic import photo_tree
from fastpipe.core.order import BlockShard, RankBatch, ShardedBatches
from fastpipe.errors import OptionError
from fastpipe.torch import prepare

_WHY = "needs the trainers: pip install lightning accelerate (make venv installs both)"
pl = pytest.importorskip("lightning.pytorch", reason=_WHY)
accelerate = pytest.importorskip("accelerate", reason=_WHY)

RANDOM = v1.Compose([v1.RandomResizedCrop(16), v1.RandomHorizontalFlip(), v1.ToTensor()])
SEED = 5
SAMPLES = 19
SCRIPT = Path(__file__).with_name("trainer_ranks.py")

quiet = [
    # Lightning's advice.
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    # Lightning's use of torch's trees.
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning"),
]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One photograph in each class, so that labels tell which sample it is."""
    return photo_tree(tmp_path_factory.mktemp("tree"), classes=SAMPLES, per_class=1, sizes=(40, 48))


def seen_in(batch: Any) -> list[list[Any]]:
    """Which samples, and what augmentation made of them."""
    images, labels = batch
    return [[int(label), float(image.double().sum())] for image, label in zip(images, labels, strict=True)]


def labels_of(batches: Iterable[list[list[Any]]]) -> list[int]:
    return [label for batch in batches for label, _ in batch]


# ---- Lightning, one process ----------------------------------------------------------------------


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen: list[tuple[int, Any]] = []

    def training_step(self, batch: Any, number: int) -> Any:
        self.seen.append((self.current_epoch, seen_in(batch)))
        return self.weight.sum()

    def predict_step(self, batch: Any, number: int) -> Any:
        return seen_in(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class SaveEach(pl.Callback):
    """Checkpoints where scripts take them: after each batch, and at each epoch's end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        trainer.save_checkpoint(self._folder / f"step-{trainer.global_step}.ckpt")

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        trainer.save_checkpoint(self._folder / f"epoch-{trainer.global_step}.ckpt")


def trainer_of(folder: Path, *callbacks: Any, **options: Any) -> Any:
    options = {"max_epochs": 3, "enable_checkpointing": False, **options}
    return pl.Trainer(
        accelerator="cpu", devices=1, logger=False, default_root_dir=folder, callbacks=list(callbacks),
        enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip


class TestLightning:
    pytestmark = quiet

    @pytest.mark.few(3)
    @pytest.mark.parametrize("workers", [0, 2])
    @pytest.mark.parametrize("seed", [SEED, None])
    def test_resuming_is_exact(self, tree: Path, tmp_path: Path, seed: int | None, workers: int) -> None:
        def make() -> FastLoader[Any]:
            dataset = FastImageFolder(tree, RANDOM)
            return FastLoader(
                dataset,
                batch_size=4,
                shuffle=True,
                seed=seed,
                num_workers=workers,
                workers="processes",
                persistent_workers=workers > 0,
            )

        torch.manual_seed(1)
        loader, module = make(), Module()
        trainer = trainer_of(tmp_path, SaveEach(tmp_path))
        trainer.fit(module, loader)
        assert trainer.fit_loop._combined_loader.flattened == [loader]
        per_epoch = len(loader)
        assert [epoch for epoch, _ in module.seen] == [0] * per_epoch + [1] * per_epoch + [2] * per_epoch
        for epoch in range(3):
            labels = labels_of(batch for number, batch in module.seen if number == epoch)
            assert sorted(labels) == list(range(SAMPLES))
        for name in ("step-2", "step-5", "epoch-5", "step-8", "step-10", "epoch-10", "step-14"):
            step = int(name.split("-")[1])
            torch.manual_seed(2)
            again = Module()
            # Of a checkpoint from ``on_train_epoch_end`` without validation Lightning loads no loader's state.
            is_lost = seed is None and name.startswith("epoch")
            with pytest.warns(UserWarning, match="begins with epoch") if is_lost else nullcontext():
                trainer_of(tmp_path).fit(again, make(), ckpt_path=tmp_path / f"{name}.ckpt")
            expected = module.seen[step:]
            assert [epoch for epoch, _ in again.seen] == [epoch for epoch, _ in expected], name
            assert is_lost or again.seen == expected, name

    def test_a_run_under_a_seed_is_that_of_a_plain_loop(self, tree: Path, tmp_path: Path) -> None:
        dataset = FastImageFolder(tree, RANDOM, seed=SEED)
        module = Module()
        trainer_of(tmp_path).fit(module, FastLoader(dataset, batch_size=4, shuffle=True))
        loader = FastLoader(dataset, batch_size=4, shuffle=True)
        assert [batch for _, batch in module.seen] == [seen_in(batch) for _ in range(3) for batch in loader]

    # Lightning says so when it takes the shuffling away.
    @pytest.mark.filterwarnings("ignore:You requested to overfit")
    def test_predicting_and_overfitting_make_the_loader_anew(self, tree: Path, tmp_path: Path) -> None:
        dataset = FastImageFolder(tree, RANDOM, seed=SEED)
        loader = FastLoader(dataset, batch_size=4, prefetch_batches=3, seed=SEED)
        trainer = trainer_of(tmp_path)
        assert trainer.predict(Module(), loader) == [seen_in(batch) for batch in loader]
        used = trainer.predict_loop._combined_loader.flattened[0]
        assert (type(used), used.seed, used.prefetch_batches) == (FastLoader, SEED, 3)
        module = Module()
        trainer_of(tmp_path, overfit_batches=2, max_epochs=2).fit(
            module, FastLoader(dataset, batch_size=4, shuffle=True)
        )
        first, second = ([batch for epoch, batch in module.seen if epoch == number] for number in (0, 1))
        assert labels_of(first) == labels_of(second) == list(range(8))
        assert first != second, "augmentation goes on"

    def test_a_sampler_without_state_can_be_trained_with(self, tree: Path, tmp_path: Path) -> None:
        def make() -> FastLoader[Any]:
            return FastLoader(FastImageFolder(tree, RANDOM, seed=SEED), batch_size=4, sampler=_Backwards())

        loader, module = make(), Module()
        with pytest.warns(UserWarning, match="does not say where in its epoch.*_Backwards") as caught:
            trainer_of(tmp_path, SaveEach(tmp_path)).fit(module, loader)
        assert sum("_Backwards" in str(warning.message) for warning in caught) == 1
        with pytest.raises(OptionError, match="_Backwards"):
            loader.state_dict()
        again = Module()
        trainer_of(tmp_path).fit(again, make(), ckpt_path=tmp_path / "step-5.ckpt")
        assert again.seen == module.seen[5:]
        with pytest.raises(OptionError, match="after 3 batches"):
            trainer_of(tmp_path).fit(Module(), make(), ckpt_path=tmp_path / "step-8.ckpt")


class _Backwards(torch.utils.data.Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return reversed(range(SAMPLES))

    def __len__(self) -> int:
        return SAMPLES


# ---- Lightning, two processes --------------------------------------------------------------------


def run_ranks(what: str, folder: Path, world: int, *launcher: str) -> list[dict[str, Any]]:
    """What each rank of the script found."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen(
        [sys.executable, *launcher, str(SCRIPT), what, str(folder)],
        env=environment, start_new_session=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=150)
    finally:  # ranks of their own session end with it
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
    assert process.returncode == 0, output
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]


def by_turns(ranks: list[list[Any]]) -> list[Any]:
    """The samples of all ranks in the order that the epoch has them."""
    steps = zip(*ranks, strict=True)
    turns = (turn for step in steps for turn in itertools.zip_longest(*step))
    return [sample for turn in turns for sample in turn if sample is not None]


@pytest.mark.slow  # three processes that import Lightning
def test_lightning_on_two_ranks(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "photos").symlink_to(tree)
    found = run_ranks("lightning", tmp_path, 2)
    dataset = FastImageFolder(tree, RANDOM, seed=SEED)
    samplers = {
        "fit": "DistributedSampler", "fit, shard": "ShardSampler", "two batches": "ShardSampler",
        "predict": "SequentialSampler", "predict, shard": "SequentialSampler",
    }  # fmt: skip
    for rank in found:
        for name, sampler in samplers.items():
            assert rank[name]["kinds"] == ["FastLoader", SEED, True, sampler], name
    shuffled = DistributedSampler(dataset, 1, 0, shuffle=True)
    expected = {
        "fit": FastLoader(dataset, batch_size=4, sampler=shuffled),
        "fit, shard": FastLoader(dataset, batch_size=4, shuffle=True),
        "predict": FastLoader(dataset, batch_size=4),
        "predict, shard": FastLoader(dataset, batch_size=4),
    }
    for name, loader in expected.items():
        for epoch in range(2 if name.startswith("fit") else 1):
            loader.set_epoch(epoch)
            samples = by_turns([rank[name]["seen"][3 * epoch : 3 * epoch + 3] for rank in found])
            # One sample comes twice, so that ranks have equally many, in whole or by Lightning's choice.
            assert samples[:SAMPLES] == [sample for batch in loader for sample in seen_in(batch)], (
                name,
                epoch,
            )
            assert len(samples) <= SAMPLES + 1
    few = [labels_of(rank["two batches"]["seen"]) for rank in found]
    assert few == [[*range(0, 16, 2)] * 2, [*range(1, 16, 2)] * 2]


# ---- Accelerate, one process ---------------------------------------------------------------------


class Rows(torch.utils.data.Dataset[Any]):
    """Sample i is i; of those at ``broken``, an error."""

    def __init__(self, length: int = SAMPLES, broken: int | None = None) -> None:
        self._length, self._broken = length, broken

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self._broken:
            raise ValueError("broken")
        return torch.tensor([float(index)])


def numbers(batches: Iterable[torch.Tensor]) -> list[list[int]]:
    return [batch.flatten().int().tolist() for batch in batches]


def rows(**options: Any) -> FastLoader[Any]:
    return FastLoader(Rows(), batch_size=4, **{"shuffle": True, "seed": SEED, **options})


@pytest.fixture
def accelerator() -> Any:
    return accelerate.Accelerator(cpu=True, gradient_accumulation_steps=3)


def test_accelerate_sees_each_steps_place_in_the_epoch(accelerator: Any) -> None:
    made = rows()
    loader = prepare(accelerator, made)
    model = torch.nn.Linear(1, 1)
    model, optimizer, again = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader)
    assert again is loader is prepare(accelerator, loader)
    assert isinstance(loader, FastLoader) and (loader.seed, len(loader)) == (SEED, 5)
    assert accelerator._dataloaders.count(loader) == 1
    steps = []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).sum())
            optimizer.step()
        state, gradient = loader.state_dict(), accelerator.gradient_state
        steps.append(
            (accelerator.sync_gradients, gradient.end_of_dataloader, state["epoch"], state["batches"])
        )
    # At the last batch the state is the next epoch's start, as that of Accelerate's own loaders.
    assert steps == [
        (False, False, 0, 1),
        (False, False, 0, 2),
        (True, False, 0, 3),
        (False, False, 0, 4),
        (True, True, 1, 0),
    ]
    assert not accelerator.gradient_state.in_dataloader
    assert numbers(loader) == [numbers(made), numbers(made)][1]
    evaluated = prepare(accelerator, rows(shuffle=False))
    gathered = torch.cat([accelerator.gather_for_metrics(batch) for batch in evaluated])
    assert gathered.flatten().int().tolist() == list(range(SAMPLES))
    accelerator.free_memory()


@pytest.mark.parametrize(
    "options", [{}, {"seed": None}, {"num_workers": 2, "persistent_workers": True}], ids=str
)
def test_accelerate_saves_and_loads_the_place_in_the_epoch(
    accelerator: Any, tmp_path: Path, options: dict[str, Any]
) -> None:
    torch.manual_seed(1)
    loader = prepare(accelerator, rows(**options))
    first, second = numbers(loader), []
    for number, batch in enumerate(loader):
        second += numbers([batch])
        if number == 1:
            accelerator.save_state(tmp_path)
    accelerator.free_memory()
    again = prepare(accelerator, rows(**options))
    accelerator.load_state(tmp_path)
    assert numbers(again) == second[2:]
    assert first != second
    for batch in again:
        break
    assert again.state_dict()["batches"] == 1
    assert not accelerator.gradient_state.in_dataloader
    accelerator.free_memory()


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_the_state_is_that_at_the_users_batch(tmp_path: Path, accelerator: Any, policy: str) -> None:
    folder = tmp_path / "photos"
    photo_tree(folder, classes=SAMPLES, per_class=1, sizes=(40, 48))
    if policy == "skip":
        for path in sorted(folder.rglob("*.jpg"))[2:9:3]:
            path.write_bytes(b"not an image")

    def make() -> FastLoader[Any]:
        dataset = FastImageFolder(folder, RANDOM, bad_samples=policy)
        return prepare(accelerator, FastLoader(dataset, batch_size=4, shuffle=True, seed=SEED))

    loader = make()
    batches, states = [], []
    for batch in loader:
        batches.append(seen_in(batch))
        states.append(loader.state_dict())
    assert len(batches) == (5 if policy == "raise" else 4)
    for number, state in enumerate(states[:-1]):
        loader = make()
        loader.load_state_dict(json.loads(json.dumps(state)))
        assert [seen_in(batch) for batch in loader] == batches[number + 1 :]
    accelerator.free_memory()


def test_an_error_comes_when_its_batch_is_due(accelerator: Any) -> None:
    loader = prepare(accelerator, FastLoader(Rows(broken=9), batch_size=4))
    batches = iter(loader)
    assert numbers([next(batches), next(batches)]) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(ValueError, match="broken"):
        next(batches)
    assert not accelerator.gradient_state.in_dataloader
    accelerator.free_memory()


def test_one_process_keeps_samplers_of_the_script(accelerator: Any, tmp_path: Path) -> None:
    assert numbers(prepare(accelerator, FastLoader(Rows(), batch_size=2, sampler=[3, 1, 2]))) == [[3, 1], [2]]
    assert numbers(prepare(accelerator, FastLoader(Rows(), batch_sampler=[[3, 1], [2]]))) == [[3, 1], [2]]
    assert numbers(prepare(accelerator, FastLoader(Rows(), batch_size=None)))[:2] == [[0], [1]]
    changed = FastLoader(Rows(), 2)
    assert changed.batch_sampler is not None
    changed.batch_sampler.batch_size = 5  # type: ignore[attr-defined]
    assert numbers(prepare(accelerator, changed))[0] == [0, 1, 2, 3, 4]
    torch.manual_seed(3)
    stock = numbers(DataLoader(Rows(), batch_size=4, shuffle=True))
    torch.manual_seed(3)
    assert numbers(prepare(accelerator, DataLoader(Rows(), batch_size=4, shuffle=True))) == stock
    seeded = prepare(accelerator, DataLoader(Rows(), batch_size=4, shuffle=True), seed=SEED)
    assert numbers(seeded) == numbers(rows())
    own = FastLoader(Rows(), batch_size=4, sampler=RandomSampler(Rows()))
    own.sampler.data_source = own.dataset  # type: ignore[attr-defined]
    torch.manual_seed(3)
    assert numbers(prepare(accelerator, own, seed=SEED)) == stock
    accelerator.free_memory()
    without_state = prepare(accelerator, FastLoader(Rows(), batch_size=4, sampler=_Backwards()))
    with pytest.warns(UserWarning, match="_Backwards"):
        accelerator.save_state(tmp_path)
    accelerator.load_state(tmp_path)
    assert len(numbers(without_state)) == 5
    accelerator.free_memory()


def test_batches_go_to_the_accelerators_device() -> None:
    def fake(is_placed: bool) -> Any:
        told = SimpleNamespace(_add_dataloader=lambda loader: None, _remove_dataloader=lambda loader: None)
        return SimpleNamespace(
            gradient_state=told, num_processes=1, process_index=0, device=torch.device("meta"),
            device_placement=is_placed, split_batches=False, dispatch_batches=None, even_batches=True,
            prepare_data_loader=lambda loader: loader,
        )  # fmt: skip

    assert {batch.device.type for batch in prepare(fake(True), rows())} == {"meta"}
    assert {batch.device.type for batch in prepare(fake(False), rows())} == {"cpu"}


class _Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class _Own(FastLoader[Any]):
    pass


def test_what_prepare_refuses(accelerator: Any) -> None:
    def refused(match: str, *arguments: Any) -> None:
        with pytest.raises(OptionError, match=match):
            prepare(*arguments)

    refused("takes an accelerate.Accelerator first, got a FastLoader", rows(), accelerator)
    refused("takes a torch.utils.data.DataLoader", accelerator, Rows())
    refused("IterableDataset", accelerator, FastLoader(_Stream()))
    refused("without what _Own adds", accelerator, _Own(Rows()))
    refused("the one from before", accelerator, accelerator.prepare(DataLoader(Rows())))
    for options in ({"split_batches": True}, {"dispatch_batches": True}, {"even_batches": False}):
        configured = accelerate.Accelerator(
            cpu=True, dataloader_config=accelerate.DataLoaderConfiguration(**options)
        )
        refused(next(iter(options)), configured, rows())
    accelerator.free_memory()


# ---- Accelerate, several processes ---------------------------------------------------------------


@given(count=st.integers(0, 70), size=st.integers(1, 7), world=st.integers(1, 6), start=st.integers(0, 30))
def test_blocks_are_the_steps_of_ranks_that_take_turns(count: int, size: int, world: int, start: int) -> None:
    def steps_of(kind: type[Shard]) -> list[tuple[RankBatch, ...]]:
        ranks = (
            ShardedBatches(count, size, kind(rank, world), drop_last=False, start=start)
            for rank in range(world)
        )
        return list(zip(*ranks, strict=True))

    for blocks, turns in zip(steps_of(BlockShard), steps_of(Shard), strict=True):
        assert [block.size for block in blocks] == [batch.size for batch in turns]
        assert {block.end for block in blocks} == {turns[0].end}
        positions = [position for block in blocks for position in block.positions]
        assert positions == sorted(position for batch in turns for position in batch.positions)


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


@pytest.mark.slow
def test_accelerate_on_two_ranks(tree: Path, tmp_path: Path, accelerator: Any) -> None:
    (tmp_path / "photos").symlink_to(tree)
    found = run_ranks("accelerate", tmp_path, 2, *TORCHRUN, "2")
    ranks, refused = ([rank.pop(name) for rank in found] for name in ("photos", "refused"))
    assert found[0] == found[1]
    first = found[0]
    assert first["kinds"] == ["FastLoader", SEED, 3, True]
    for length in (19, 10, 16, 1):
        assert first[f"gathered {length}"] == list(range(length))
    # Each rank's block of each step, one after the other, is one process's epoch, augmentation included.
    dataset = FastImageFolder(tree, RANDOM, seed=SEED)
    alone = FastLoader(dataset, batch_size=8, shuffle=True)
    samples = [sample for step in zip(*ranks, strict=True) for block in step for sample in block]
    assert samples[:SAMPLES] == [sample for batch in alone for sample in seen_in(batch)]
    assert len(samples) == SAMPLES + 1
    assert first["steps"] == [
        [False, False],
        [False, False],
        [True, False],
        [False, False],
        [False, False],
        [True, True],
    ]
    whole = FastLoader(Rows(43), batch_size=8, shuffle=True, seed=SEED)
    epoch = numbers(whole)
    assert first["before"] == epoch[1:2]
    assert first["rest"] == epoch[2:]
    matches = (
        "needs a seed",
        "needs a seed",
        "a sampler of its own",
        "a batch_sampler of its own",
        "leave shard= out",
        "give a batch_size",
    )
    assert [match in text for match, text in zip(matches, refused[0], strict=True)] == [True] * len(matches)
    assert "even_batches=False" in first["uneven"]
    # One process goes on where two were.
    one = prepare(accelerator, FastLoader(Rows(43), batch_size=4, shuffle=True, seed=SEED))
    accelerator.load_state(tmp_path / "state")
    assert sum(numbers(one), []) == sum(epoch[2:], [])
    accelerator.free_memory()


@pytest.mark.slow
def test_accelerate_goes_on_with_another_number_of_ranks(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "photos").symlink_to(tree)
    run_ranks("accelerate", tmp_path, 2, *TORCHRUN, "2")
    for found in run_ranks("resume", tmp_path, 3, *TORCHRUN, "3"):
        whole = FastLoader(Rows(43), batch_size=12, shuffle=True, seed=SEED)
        epochs = [sum(numbers(whole), []) for _ in range(2)]
        assert sum(found["rest"], []) == epochs[0][16:]
        assert sum(found["after"], []) == epochs[1]


# ---- timm ----------------------------------------------------------------------------------------


class _Prefetching:
    """What timm's PrefetchLoader asks of the loader that it wraps."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        waiting = None
        for batch in self.loader:
            if waiting is not None:
                yield waiting
            waiting = batch
        yield waiting

    def __len__(self) -> int:
        return len(self.loader)

    def describe(self) -> tuple[Any, ...]:
        loader = self.loader
        return loader.sampler, loader.dataset, loader.collate_fn, len(loader.sampler)


@pytest.mark.parametrize("shard", [None, Shard(1, 2)])
def test_a_loader_inside_timms(shard: Shard | None) -> None:
    alone = [rows(shard=shard) for _ in range(2)]
    wrapped = _Prefetching(alone[0])
    sampler, dataset, _, length = wrapped.describe()
    assert (length, len(dataset)) == (SAMPLES if shard is None else 10, SAMPLES)
    for epoch in (0, 3):  # timm's training loop, with a sampler that has the method
        sampler.set_epoch(epoch)
        alone[1].set_epoch(epoch)
        assert numbers(wrapped) == numbers(alone[1])
    assert len(wrapped) == len(numbers(alone[1]))
