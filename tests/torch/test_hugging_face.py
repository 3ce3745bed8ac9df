"""``accelerate_trainer``: Hugging Face's Trainer has the batches, order and resumed runs that it had."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader
from trainer_ranks import NoisyRows, hugging_face_trainer, run_ranks, seen_by_trainers

from fastpipe import FastLoader
from fastpipe.errors import OptionError
from fastpipe.torch import accelerate_trainer, prepare

_WHY = "needs Hugging Face's Trainer: pip install transformers accelerate (make venv installs both)"
pytest.importorskip("transformers", reason=_WHY)
pytest.importorskip("accelerate", reason=_WHY)


def as_it_is(trainer: Any) -> Any:
    return trainer


@pytest.mark.parametrize(
    "options", [
        {}, {"dataloader_num_workers": 1}, {"data_seed": 7},
        {"dataloader_drop_last": True, "gradient_accumulation_steps": 2},
    ],
)  # fmt: skip
def test_it_trains_and_evaluates_with_the_same_batches(tmp_path: Path, options: dict[str, Any]) -> None:
    seen = []
    for change in (as_it_is, accelerate_trainer):
        trainer = change(hugging_face_trainer(tmp_path, **options))
        trainer.train()
        trainer.evaluate()
        trainer.predict(NoisyRows())
        seen.append(trainer.model.seen)
    assert len(seen[0]) == (15 if "dataloader_drop_last" in options else 20)
    assert seen[0] == seen[1]


def test_it_resumes_with_the_same_batches(tmp_path: Path) -> None:
    stock, fast = (seen_by_trainers(tmp_path, change, [2, 4, 7]) for change in (as_it_is, accelerate_trainer))
    assert [len(one) for one in stock] == [12, 10, 8, 5]
    assert stock == fast


@pytest.mark.slow  # two processes that import transformers
def test_two_ranks_have_the_same_batches(tmp_path: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    for rank in run_ranks("hugging_face", tmp_path, 2, *torchrun):
        assert [len(one) for one in rank["stock"]] == [6, 3]
        assert rank["stock"] == rank["fast"]


def test_its_loaders_are_accelerates_over_fast_loaders(tmp_path: Path) -> None:
    trainer = hugging_face_trainer(tmp_path)
    assert type(trainer.get_train_dataloader().base_dataloader) is DataLoader
    assert accelerate_trainer(accelerate_trainer(trainer)) is trainer
    for loader in (
        trainer.get_train_dataloader(), trainer.get_eval_dataloader(), trainer.get_eval_dataloader(NoisyRows()),
        trainer.get_test_dataloader(NoisyRows()),
    ):  # fmt: skip
        assert type(loader).__name__ == "DataLoaderShard" and isinstance(loader.base_dataloader, FastLoader)
        assert not hasattr(loader.base_dataloader, "state_dict")


def test_a_trainer_may_make_its_own_loader(tmp_path: Path) -> None:
    trainer, rows = hugging_face_trainer(tmp_path), NoisyRows()
    fast = FastLoader(rows, 3)
    for own in (DataLoader(rows, 3), fast, prepare(trainer.accelerator, fast)):
        trainer.get_train_dataloader = lambda own=own: own
        found = accelerate_trainer(trainer).get_train_dataloader()
        assert isinstance(found, FastLoader) and (found is own) == isinstance(own, FastLoader)
        assert next(batch["x"].flatten().tolist() for batch in found) == [0, 1, 2]


def test_something_else_is_an_error() -> None:
    with pytest.raises(OptionError, match=r"takes a transformers\.Trainer, got a DataLoader"):
        accelerate_trainer(DataLoader(NoisyRows()))
