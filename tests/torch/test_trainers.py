"""torchrun, Lightning and Accelerate: the loader stays itself, and ranks share an epoch."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from streams import OwnSampler, Stream
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler
from trainer_ranks import (
    RANDOM,
    SAMPLES,
    SEED,
    Rows,
    lightning_module,
    numbers,
    rows,
    run_ranks,
    seen_in,
    trainer_of,
)

import fastpipe
from fastpipe import FastImageFolder, FastLoader, Shard
from fastpipe.bench.synthetic import photo_tree
from fastpipe.core.order import BlockShard, RankBatch, ShardedBatches
from fastpipe.errors import OptionError
from fastpipe.torch import prepare

_WHY = "needs the trainers: pip install lightning accelerate (make venv installs both)"
pl = pytest.importorskip("lightning.pytorch", reason=_WHY)
accelerate = pytest.importorskip("accelerate", reason=_WHY)

# Lightning's advice, and its use of torch's trees.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers", "ignore:.*LeafSpec.* is deprecated:FutureWarning",
    "ignore:You defined a `validation_step` but have no",
)  # fmt: skip
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One photograph in each class, so that labels tell which sample it is."""
    return photo_tree(tmp_path_factory.mktemp("tree"), classes=SAMPLES, per_class=1, sizes=(40, 48))


@pytest.fixture
def folder(tree: Path, tmp_path: Path) -> Path:
    (tmp_path / "photos").symlink_to(tree)
    return tmp_path


def labels_of(batches: Iterable[list[list[Any]]]) -> list[int]:
    return [label for batch in batches for label, _ in batch]


def _backwards() -> OwnSampler:
    return OwnSampler(lambda: reversed(range(SAMPLES)), SAMPLES)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_share_an_epoch(world: int, folder: Path) -> None:
    ranks = run_ranks("shard", folder, world, *TORCHRUN, str(world))
    assert [rank["shard"] for rank in ranks] == [[number, world, number, world] for number in range(world)]
    alone = FastLoader(FastImageFolder(folder / "photos", RANDOM), 1, shuffle=True, seed=SEED)
    for epoch in range(2):
        batches = [rank["train"][epoch] for rank in ranks]
        assert {len(of_rank) for of_rank in batches} == {ranks[0]["length"]}
        for step in zip(*batches, strict=True):
            assert len({len(batch) for batch in step}) == 1
        # Position p of the order is at rank p mod world, with the augmentation of one process.
        merged = [row for turn in zip(*(sum(part, []) for part in batches), strict=True) for row in turn]
        assert merged[:SAMPLES] == [seen_in(batch)[0] for batch in alone]
    assert sorted(labels_of(batch for rank in ranks for batch in rank["eval"])) == list(range(SAMPLES))
    assert len({len(rank["eval"]) for rank in ranks}) == 1
    assert ranks[0]["alone"] == -(-SAMPLES // (2 * world)), "a loader that one rank uses alone does not hang"
    assert [rank["warned"] for rank in ranks] == [[]] * world
    for number, rank in enumerate(ranks):
        (warning,) = rank["disagree"]
        assert f"rank {number} and rank" in warning and "seed is" in warning


# Lightning says so when it takes the shuffling away.
@pytest.mark.filterwarnings("ignore:You requested to overfit")
def test_lightning_gives_the_batches_of_a_plain_loop(tree: Path, tmp_path: Path) -> None:
    dataset = FastImageFolder(tree, RANDOM, seed=SEED)
    loader, again = (FastLoader(dataset, 4, shuffle=True) for _ in range(2))
    module, trainer = lightning_module(), trainer_of(tmp_path, max_epochs=3)
    trainer.fit(module, loader)
    assert trainer.fit_loop._combined_loader.flattened == [loader]
    assert module.seen == [seen_in(batch) for _ in range(3) for batch in again]
    # For these it makes the loader anew.
    loader, trainer = FastLoader(dataset, 4, prefetch_batches=3, seed=SEED), trainer_of(tmp_path)
    assert trainer.predict(lightning_module(), loader) == [seen_in(batch) for batch in loader]
    used = trainer.predict_loop._combined_loader.flattened[0]
    assert (type(used), used.seed, used.prefetch_batches) == (FastLoader, SEED, 3)
    module = lightning_module()
    trainer_of(tmp_path, overfit_batches=2).fit(module, FastLoader(dataset, 4, shuffle=True))
    assert labels_of(module.seen[:2]) == labels_of(module.seen[2:]) == list(range(8))
    assert module.seen[:2] != module.seen[2:], "augmentation goes on"


class _SaveEach(pl.Callback):
    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        trainer.save_checkpoint(f"{trainer.default_root_dir}/step-{trainer.global_step}.ckpt")


def test_lightning_can_train_with_a_sampler_without_state(tree: Path, tmp_path: Path) -> None:
    def make() -> FastLoader[Any]:
        return FastLoader(FastImageFolder(tree, RANDOM, seed=SEED), 4, sampler=_backwards())

    loader, module = make(), lightning_module()
    with pytest.warns(UserWarning, match="does not say where in its epoch.*OwnSampler") as caught:
        trainer_of(tmp_path, _SaveEach(), max_epochs=3).fit(module, loader)
    assert sum("OwnSampler" in str(warning.message) for warning in caught) == 1
    with pytest.raises(OptionError, match="OwnSampler"):
        loader.state_dict()
    again = lightning_module()
    trainer_of(tmp_path, max_epochs=3).fit(again, make(), ckpt_path=tmp_path / "step-5.ckpt")
    assert again.seen == module.seen[5:]
    with pytest.raises(OptionError, match="after 3 batches"):
        trainer_of(tmp_path, max_epochs=3).fit(lightning_module(), make(), ckpt_path=tmp_path / "step-8.ckpt")


def by_turns(ranks: list[list[Any]]) -> list[Any]:
    """The samples of all ranks in the order that the epoch has them."""
    steps = zip(*ranks, strict=True)
    turns = (turn for step in steps for turn in itertools.zip_longest(*step))
    return [sample for turn in turns for sample in turn if sample is not None]


@pytest.mark.slow  # three processes that import Lightning
def test_lightning_on_two_ranks(folder: Path) -> None:
    found = run_ranks("lightning", folder, 2)
    dataset = FastImageFolder(folder / "photos", RANDOM, seed=SEED)
    shuffled = DistributedSampler(dataset, 1, 0, shuffle=True)
    for name, sampler, loader in (
        ("fit", "DistributedSampler", FastLoader(dataset, 4, sampler=shuffled)),
        ("fit, shard", "ShardSampler", FastLoader(dataset, 4, shuffle=True)),
        ("predict", "SequentialSampler", FastLoader(dataset, 4)),
        ("predict, shard", "SequentialSampler", FastLoader(dataset, 4)),
    ):
        for rank in found:
            assert rank[name]["kinds"] == ["FastLoader", SEED, True, sampler], name
        for epoch in range(2 if name.startswith("fit") else 1):
            loader.set_epoch(epoch)
            samples = by_turns([rank[name]["seen"][3 * epoch : 3 * epoch + 3] for rank in found])
            # One sample comes twice, so that ranks have equally many, in whole or by Lightning's choice.
            assert samples[:SAMPLES] == [sample for batch in loader for sample in seen_in(batch)], name
            assert len(samples) <= SAMPLES + 1
    assert {rank["two batches"]["kinds"][-1] for rank in found} == {"ShardSampler"}
    few = [labels_of(rank["two batches"]["seen"]) for rank in found]
    assert few == [[*range(0, 16, 2)] * 2, [*range(1, 16, 2)] * 2]


def test_accelerate_sees_each_steps_place_in_the_epoch(accelerator: Any) -> None:
    made, model = rows(), torch.nn.Linear(1, 1)
    loader = prepare(accelerator, made)
    model, optimizer, again = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader)
    assert again is loader is prepare(accelerator, loader)
    assert isinstance(loader, FastLoader) and (loader.seed, len(loader)) == (SEED, 5)
    assert accelerator._dataloaders.count(loader) == 1
    steps = []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).sum())
            optimizer.step()
        state, is_last = loader.state_dict(), accelerator.gradient_state.end_of_dataloader
        steps.append((accelerator.sync_gradients, is_last, state["epoch"], state["batches"]))
    # At the last batch the state is the next epoch's start, as that of Accelerate's own loaders.
    assert steps == [
        (False, False, 0, 1), (False, False, 0, 2), (True, False, 0, 3), (False, False, 0, 4), (True, True, 1, 0)
    ]  # fmt: skip
    assert not accelerator.gradient_state.in_dataloader
    assert numbers(loader) == [numbers(made), numbers(made)][1]
    for batch in loader:
        break
    assert loader.state_dict()["batches"] == 1 and not accelerator.gradient_state.in_dataloader
    evaluated = prepare(accelerator, rows(shuffle=False))
    gathered = torch.cat([accelerator.gather_for_metrics(batch) for batch in evaluated])
    assert gathered.flatten().int().tolist() == list(range(SAMPLES))


def test_an_error_comes_when_its_batch_is_due(accelerator: Any) -> None:
    batches = iter(prepare(accelerator, FastLoader(Rows(broken=9), batch_size=4)))
    assert numbers([next(batches), next(batches)]) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(ValueError, match="broken"):
        next(batches)
    assert not accelerator.gradient_state.in_dataloader


def test_one_process_keeps_samplers_of_the_script(accelerator: Any, tmp_path: Path) -> None:
    data = Rows()
    cases: list[tuple[dict[str, Any], Any]] = [
        ({"batch_size": 2, "sampler": [3, 1, 2]}, [[3, 1], [2]]), ({"batch_sampler": [[3, 1], [2]]}, [[3, 1], [2]]),
        ({"batch_size": None}, [[number] for number in range(SAMPLES)]),
    ]  # fmt: skip
    for options, expected in cases:
        assert numbers(prepare(accelerator, FastLoader(data, **options))) == expected
    changed = FastLoader(data, 2)
    changed.batch_sampler.batch_size = 5  # type: ignore[union-attr]
    assert numbers(prepare(accelerator, changed))[0] == [0, 1, 2, 3, 4]
    stock, own = DataLoader(data, 4, shuffle=True), FastLoader(data, 4, sampler=RandomSampler(data))
    orders = []
    for loader in (stock, prepare(accelerator, stock), prepare(accelerator, own, seed=SEED)):
        torch.manual_seed(3)
        orders.append(numbers(loader))
    assert orders[0] == orders[1] == orders[2]
    assert numbers(prepare(accelerator, stock, seed=SEED)) == numbers(rows())
    accelerator.free_memory()
    without_state = prepare(accelerator, FastLoader(data, 4, sampler=_backwards()))
    with pytest.warns(UserWarning, match="OwnSampler"):
        accelerator.save_state(tmp_path)
    accelerator.load_state(tmp_path)
    assert len(numbers(without_state)) == 5


def test_batches_go_to_the_accelerators_device() -> None:
    def fake(is_placed: bool) -> Any:
        state = SimpleNamespace(_add_dataloader=lambda loader: None, _remove_dataloader=lambda loader: None)
        return SimpleNamespace(
            gradient_state=state, num_processes=1, process_index=0, device=torch.device("meta"),
            device_placement=is_placed, split_batches=False, dispatch_batches=None, even_batches=True,
            prepare_data_loader=lambda loader: loader,
        )  # fmt: skip

    assert {batch.device.type for batch in prepare(fake(True), rows())} == {"meta"}
    assert {batch.device.type for batch in prepare(fake(False), rows())} == {"cpu"}


def test_prepare_refuses_what_it_cannot_keep(accelerator: Any) -> None:
    def configured(**options: bool) -> Any:
        configuration = accelerate.DataLoaderConfiguration(**options)
        return accelerate.Accelerator(cpu=True, dataloader_config=configuration)

    for words, first, second in (
        ("takes an accelerate.Accelerator first, got a FastLoader", rows(), accelerator),
        ("takes a torch.utils.data.DataLoader", accelerator, Rows()),
        ("IterableDataset", accelerator, FastLoader(Stream())),
        ("without what Own adds", accelerator, type("Own", (FastLoader,), {})(Rows())),
        ("the one from before", accelerator, accelerator.prepare(DataLoader(Rows()))),
        ("split_batches", configured(split_batches=True), rows()),
        ("dispatch_batches", configured(dispatch_batches=True), rows()),
        ("even_batches", configured(even_batches=False), rows()),
    ):
        with pytest.raises(OptionError, match=words):
            prepare(first, second)


def test_a_loader_that_was_prepared_is_refused_with_the_remedy(accelerator: Any) -> None:
    with pytest.raises(OptionError, match=r"torch\.prepare\(accelerator, loader\) with.*accelerate_trainer"):
        fastpipe.accelerate(accelerator.prepare(DataLoader(Rows())))


@given(count=st.integers(0, 70), size=st.integers(1, 7), world=st.integers(1, 6), start=st.integers(0, 30))
def test_blocks_are_the_steps_of_ranks_that_take_turns(count: int, size: int, world: int, start: int) -> None:
    def steps_of(kind: type[Shard]) -> list[tuple[RankBatch, ...]]:
        shards = [kind(rank, world) for rank in range(world)]
        ranks = (ShardedBatches(count, size, shard, drop_last=False, start=start) for shard in shards)
        return list(zip(*ranks, strict=True))

    for blocks, turns in zip(steps_of(BlockShard), steps_of(Shard), strict=True):
        assert [block.size for block in blocks] == [batch.size for batch in turns]
        assert {block.end for block in blocks} == {turns[0].end}
        positions = [position for block in blocks for position in block.positions]
        assert positions == sorted(position for batch in turns for position in batch.positions)


@pytest.mark.slow
def test_accelerate_on_two_ranks_resumes_with_one_and_three(folder: Path, accelerator: Any) -> None:
    found = run_ranks("accelerate", folder, 2, *TORCHRUN, "2")
    ranks, refused = ([rank.pop(name) for rank in found] for name in ("photos", "refused"))
    assert found[0] == found[1]
    first = found[0]
    assert first["kinds"] == ["FastLoader", SEED, 3, True]
    for length in (19, 10, 16, 1):
        assert first[f"gathered {length}"] == list(range(length))
    # Each rank's block of each step, one after the other, is one process's epoch, augmentation included.
    alone = FastLoader(FastImageFolder(folder / "photos", RANDOM, seed=SEED), batch_size=8, shuffle=True)
    samples = [sample for step in zip(*ranks, strict=True) for block in step for sample in block]
    assert samples[:SAMPLES] == [sample for batch in alone for sample in seen_in(batch)]
    assert len(samples) == SAMPLES + 1
    assert first["steps"] == [[False] * 2, [False] * 2, [True, False], [False] * 2, [False] * 2, [True] * 2]
    whole = rows(43, batch_size=8)
    epochs = [numbers(whole), numbers(whole)]
    assert first["before"] == epochs[0][1:2] and first["rest"] == epochs[0][2:]
    words = "needs a seed", "needs a seed", "a sampler of its own", "a batch_sampler of its own"
    for word, text in zip([*words, "leave shard= out", "give a batch_size"], refused[0], strict=True):
        assert word in text
    assert "even_batches=False" in first["uneven"]
    one = prepare(accelerator, rows(43))
    accelerator.load_state(folder / "state")
    rest, after = sum(epochs[0][2:], []), sum(epochs[1], [])
    assert [sum(numbers(one), []), sum(numbers(one), [])] == [rest, after]
    for rank in run_ranks("resume", folder, 3, *TORCHRUN, "3"):
        assert [sum(rank["rest"], []), sum(rank["after"], [])] == [rest, after]
