"""What ``test_trainers`` runs in several processes; writes what each rank saw as JSON.

Usage: trainer_ranks.py (lightning | accelerate | resume) FOLDER
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fastpipe import FastImageFolder, FastLoader, Shard
from fastpipe.errors import OptionError
from fastpipe.torch import prepare

SEED = 5
SAMPLES = 19


class Rows(torch.utils.data.Dataset[Any]):
    """Sample i is i."""

    def __init__(self, length: int = SAMPLES) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index)])


def numbers(batches: Any) -> list[list[int]]:
    return [batch.flatten().int().tolist() for batch in batches]


def write(folder: Path, rank: int, found: dict[str, Any]) -> None:
    (folder / f"{rank}.json").write_text(json.dumps(found))


def lightning(folder: Path) -> None:
    """Fit, predict and fit on two batches, with ``shard=`` and without."""
    from lightning import pytorch as pl

    warnings.simplefilter("ignore")  # Lightning's advice: more workers, a logger …
    rank = int(os.environ.get("LOCAL_RANK", "0"))

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))
            self.seen: list[Any] = []

        def _look(self, batch: Any) -> Any:
            images, labels = batch
            self.seen.append([[int(n), float(x.double().sum())] for x, n in zip(images, labels, strict=True)])
            return self.weight.sum()

        def training_step(self, batch: Any, number: int) -> Any:
            return self._look(batch)

        def predict_step(self, batch: Any, number: int) -> Any:
            self._look(batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    found = {}
    for name, stage, shard, options in (
        ("fit", "fit", None, {}), ("fit, shard", "fit", Shard(rank, 2), {}),
        ("predict", "predict", None, {}), ("predict, shard", "predict", Shard(rank, 2), {}),
        ("two batches", "fit", Shard(rank, 2), {"overfit_batches": 2}),
    ):  # fmt: skip
        trainer = pl.Trainer(
            accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, logger=False, default_root_dir=folder,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, **options,
        )  # fmt: skip
        module = Module()
        loader = FastLoader(
            FastImageFolder(folder / "photos", _transform(), seed=SEED),
            batch_size=4,
            shuffle=stage == "fit",
            shard=shard,
        )
        getattr(trainer, stage)(module, loader)
        loop = trainer.fit_loop if stage == "fit" else trainer.predict_loop
        used = loop._combined_loader.flattened[0]
        kinds = [
            type(used).__name__,
            used._effective_seed(),
            used.shard == shard,
            type(used.sampler).__name__,
        ]
        found[name] = {"kinds": kinds, "seen": module.seen}
    write(folder, rank, found)


def _transform() -> Any:
    from torchvision import transforms as v1

    return v1.Compose([v1.RandomResizedCrop(16), v1.RandomHorizontalFlip(), v1.ToTensor()])


def accelerate(folder: Path) -> None:
    """``prepare`` over processes: parts, gathering, saving."""
    from accelerate import Accelerator, DataLoaderConfiguration

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    found: dict[str, Any] = {}
    photos = FastImageFolder(folder / "photos", _transform(), seed=SEED)
    loader = prepare(accelerator, FastLoader(photos, batch_size=4, shuffle=True))
    found["kinds"] = [
        type(loader).__mro__[1].__name__,
        loader.seed,
        len(loader),
        accelerator._dataloaders == [loader],
    ]
    found["photos"] = [
        [[int(n), float(x.double().sum())] for x, n in zip(*batch, strict=True)] for batch in loader
    ]
    for length in (19, 10, 16, 1):
        evaluated = prepare(accelerator, torch.utils.data.DataLoader(Rows(length), batch_size=4))
        gathered = torch.cat([accelerator.gather_for_metrics(batch) for batch in evaluated])
        found[f"gathered {length}"] = gathered.flatten().int().tolist()
    accelerator.free_memory()
    model = torch.nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    loader = prepare(accelerator, FastLoader(Rows(43), batch_size=4, shuffle=True, seed=SEED))
    steps, before = [], []
    for number, batch in enumerate(loader):
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).sum())
            optimizer.step()
        steps.append([accelerator.sync_gradients, accelerator.gradient_state.end_of_dataloader])
        if number == 1:
            accelerator.save_state(folder / "state")
            before = numbers([accelerator.gather(batch)])
    accelerator.load_state(folder / "state")
    rest = numbers(accelerator.gather_for_metrics(batch) for batch in loader)
    found |= {"steps": steps, "before": before, "rest": rest, "refused": _refused(accelerator)}
    uneven = DataLoaderConfiguration(even_batches=False)
    found["uneven"] = _error(lambda: prepare(Accelerator(cpu=True, dataloader_config=uneven), loader))
    write(folder, accelerator.process_index, found)
    accelerator.end_training()


def _refused(accelerator: Any) -> list[str]:
    rows = Rows()
    cases: list[Callable[[], Any]] = [
        lambda: FastLoader(rows, 4, shuffle=True),
        lambda: torch.utils.data.DataLoader(rows, 4, shuffle=True),
        lambda: FastLoader(rows, 4, sampler=[3, 1, 2], seed=1),
        lambda: FastLoader(rows, batch_sampler=[[3, 1], [2]], seed=1),
        lambda: FastLoader(rows, 4, shard=Shard(0, 3)),
        lambda: FastLoader(rows, None),
    ]
    return [_error(lambda make=make: prepare(accelerator, make())) for make in cases]


def _error(call: Callable[[], Any]) -> str:
    try:
        call()
    except OptionError as error:
        return str(error)
    return ""


def resume(folder: Path) -> None:
    """The rest of the epoch that ``accelerate`` has saved, gathered from any number of processes."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    loader = prepare(accelerator, FastLoader(Rows(43), batch_size=4, shuffle=True, seed=SEED))
    accelerator.load_state(folder / "state")
    rest = numbers(accelerator.gather_for_metrics(batch) for batch in loader)
    after = numbers(accelerator.gather_for_metrics(batch) for batch in loader)
    write(folder, accelerator.process_index, {"rest": rest, "after": after})
    accelerator.end_training()


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"lightning": lightning, "accelerate": accelerate, "resume": resume}[sys.argv[1]](Path(sys.argv[2]))
