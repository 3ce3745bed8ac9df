"""``accelerate_trainer``: Hugging Face's Trainer has the batches, the order and the resumed runs that it had."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from fastpipe import FastLoader
from fastpipe.errors import OptionError
from fastpipe.torch import accelerate_trainer, prepare

_WHY = "needs Hugging Face's Trainer: pip install transformers accelerate (make venv installs both)"
transformers = pytest.importorskip("transformers", reason=_WHY)
pytest.importorskip("accelerate", reason=_WHY)

SAMPLES, SIZE, EPOCHS = 11, 3, 3


class Rows(torch.utils.data.Dataset[Any]):
    """Sample i is i, with a random number, as of an augmentation."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.tensor([float(index)]), "noise": torch.rand(1)}


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen: list[list[float]] = []

    def forward(self, x: torch.Tensor, noise: torch.Tensor) -> dict[str, torch.Tensor]:
        self.seen.append(torch.cat([x, noise]).flatten().tolist())
        return {"loss": (self.weight - x).square().mean(), "logits": x}


def trainer_in(folder: Path, **options: Any) -> Any:
    args = {
        "output_dir": str(folder), "per_device_train_batch_size": SIZE, "per_device_eval_batch_size": SIZE,
        "num_train_epochs": EPOCHS, "report_to": "none", "use_cpu": True, "disable_tqdm": True,
        "save_strategy": "no", "remove_unused_columns": False, "dataloader_pin_memory": False,
    }  # fmt: skip
    args = transformers.TrainingArguments(**{**args, **options})
    return transformers.Trainer(Model(), args, train_dataset=Rows(), eval_dataset=Rows())


def as_it_is(trainer: Any) -> Any:
    return trainer


def base_of(loader: Any) -> type[Any]:
    return type(loader.base_dataloader)


@pytest.mark.parametrize(
    "options", [
        {}, {"dataloader_num_workers": 1}, {"data_seed": 7},
        {"dataloader_drop_last": True, "gradient_accumulation_steps": 2},
    ],
)  # fmt: skip
def test_it_trains_and_evaluates_with_the_same_batches(tmp_path: Path, options: dict[str, Any]) -> None:
    seen = []
    for change in (as_it_is, accelerate_trainer):
        trainer = change(trainer_in(tmp_path, **options))
        trainer.train()
        trainer.evaluate()
        trainer.predict(Rows())
        seen.append(trainer.model.seen)
    assert len(seen[0]) >= (EPOCHS + 2) * (SAMPLES // SIZE)
    assert seen[0] == seen[1]


def test_it_resumes_with_the_same_batches(tmp_path: Path) -> None:
    seen = []
    for change in (as_it_is, accelerate_trainer):
        for step in (0, 2, 4, 7):
            trainer = change(trainer_in(tmp_path, save_strategy="steps", save_steps=1))
            trainer.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}") if step else None)
            seen.append(trainer.model.seen)
    assert [len(one) for one in seen[:4]] == [12, 10, 8, 5]
    assert seen[:4] == seen[4:]


def test_its_loaders_are_accelerates_over_fast_loaders(tmp_path: Path) -> None:
    trainer = accelerate_trainer(accelerate_trainer(trainer_in(tmp_path)))
    loaders = (
        trainer.get_train_dataloader(), trainer.get_eval_dataloader(), trainer.get_eval_dataloader(Rows()),
        trainer.get_test_dataloader(Rows()),
    )  # fmt: skip
    for loader in loaders:
        assert type(loader).__name__ == "DataLoaderShard" and issubclass(base_of(loader), FastLoader)
        assert not hasattr(loader.base_dataloader, "state_dict")
    assert base_of(trainer_in(tmp_path).get_train_dataloader()) is DataLoader


def test_a_trainer_may_make_its_own_loader(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path)
    for own, kind in (
        (DataLoader(Rows(), SIZE), FastLoader), (FastLoader(Rows(), SIZE), FastLoader),
        (prepare(trainer.accelerator, FastLoader(Rows(), SIZE)), FastLoader),
    ):  # fmt: skip
        trainer.get_train_dataloader = functools.partial(lambda loader: loader, own)
        found = accelerate_trainer(trainer).get_train_dataloader()
        assert isinstance(found, kind) and (found is own) == isinstance(own, FastLoader)
        assert next(batch["x"].flatten().tolist() for batch in found) == [0, 1, 2]


def test_something_else_is_an_error() -> None:
    with pytest.raises(OptionError, match=r"takes a transformers\.Trainer, got a DataLoader"):
        accelerate_trainer(DataLoader(Rows()))
