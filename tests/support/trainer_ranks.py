"""What tests of trainers share, and what each of several processes runs for them.

Usage: trainer_ranks.py (shard | lightning | accelerate | resume | hugging_face) FOLDER
Each rank writes what it saw as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torchvision import transforms as v1

from fastpipe import FastImageFolder, FastLoader, Shard
from fastpipe.errors import OptionError
from fastpipe.torch import accelerate_trainer, prepare

SEED = 5
SAMPLES = 19
RANDOM = v1.Compose([v1.RandomResizedCrop(16), v1.RandomHorizontalFlip(), v1.ToTensor()])


class Rows(torch.utils.data.Dataset[Any]):
    """Sample i is i; the sample ``broken`` is an error."""

    def __init__(self, length: int = SAMPLES, broken: int | None = None) -> None:
        self._length, self._broken = length, broken

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self._broken:
            raise ValueError("broken")
        return torch.tensor([float(index)])


def rows(length: int = SAMPLES, **options: Any) -> FastLoader[Any]:
    """A loader of ``Rows``, shuffled by ``SEED``, in batches of four."""
    return FastLoader(Rows(length), **{"batch_size": 4, "shuffle": True, "seed": SEED, **options})


def numbers(batches: Iterable[torch.Tensor]) -> list[list[int]]:
    """The samples of batches of ``Rows``."""
    return [batch.flatten().int().tolist() for batch in batches]


def seen_in(batch: Any) -> list[list[Any]]:
    """The labels of a batch, and what augmentation made of the images."""
    return [[int(label), float(image.double().sum())] for image, label in zip(*batch, strict=True)]


def lightning_module(look: Callable[[Any], Any] = seen_in) -> Any:
    """A module whose ``seen`` has what ``look`` sees in each batch of a training or prediction."""
    from lightning import pytorch as pl  # here: it takes seconds

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))
            self.seen: list[Any] = []

        def training_step(self, batch: Any, number: int) -> Any:
            self.seen.append(look(batch))
            return self.weight.sum()

        def validation_step(self, batch: Any, number: int) -> None:
            pass

        def predict_step(self, batch: Any, number: int) -> Any:
            self.seen.append(look(batch))
            return look(batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    return Module()


def trainer_of(folder: Path, *callbacks: Any, **options: Any) -> Any:
    """A trainer of Lightning's on the CPU that shows and logs nothing."""
    from lightning import pytorch as pl

    return pl.Trainer(**{
        "accelerator": "cpu", "devices": 1, "max_epochs": 2, "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": folder,
        "callbacks": list(callbacks), **options,
    })  # fmt: skip


class NoisyRows(torch.utils.data.Dataset[Any]):
    """Sample i is i, with a random number, as of an augmentation."""

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.tensor([float(index)]), "noise": torch.rand(1)}


class _NoisyModel(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen: list[list[float]] = []

    def forward(self, x: torch.Tensor, noise: torch.Tensor) -> dict[str, torch.Tensor]:
        self.seen.append(torch.cat([x, noise]).flatten().tolist())
        return {"loss": (self.weight - x).square().mean(), "logits": x}


def hugging_face_trainer(folder: Path, **options: Any) -> Any:
    """Hugging Face's Trainer of ``NoisyRows``, three to a batch; ``model.seen`` has the batches."""
    import transformers  # here: it takes seconds

    args = transformers.TrainingArguments(**{
        "output_dir": str(folder), "per_device_train_batch_size": 3, "per_device_eval_batch_size": 3,
        "num_train_epochs": 3, "report_to": "none", "use_cpu": True, "disable_tqdm": True,
        "save_strategy": "no", "remove_unused_columns": False, "dataloader_pin_memory": False, **options,
    })  # fmt: skip
    return transformers.Trainer(_NoisyModel(), args, train_dataset=NoisyRows(), eval_dataset=NoisyRows())


def seen_by_trainers(folder: Path, change: Callable[[Any], Any], steps: Iterable[int]) -> list[Any]:
    """The batches of a training by ``hugging_face_trainer``, then of others that resume after ``steps``."""
    seen = []
    for step in (0, *steps):
        trainer = change(hugging_face_trainer(folder, save_strategy="steps", save_steps=1))
        trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{step}") if step else None)
        seen.append(trainer.model.seen)
    return seen


def run_ranks(what: str, folder: Path, world: int, *launcher: str) -> list[dict[str, Any]]:
    """Run this script; return what each rank of it found."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen(
        [sys.executable, *launcher, __file__, what, str(folder)],
        env=environment, start_new_session=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=170)
    finally:  # ranks of their own session end with it
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert process.returncode == 0, output
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]


def _write(folder: Path, rank: int, found: dict[str, Any]) -> None:
    (folder / f"{rank}.json").write_text(json.dumps(found))


def _shard(folder: Path) -> None:
    """``shard=`` on gloo."""
    from torch import distributed

    def warned(caught: list[warnings.WarningMessage]) -> list[str]:
        return [str(one.message) for one in caught if "do not share" in str(one.message)]

    distributed.init_process_group("gloo")
    shard = Shard.auto()
    ranks = [shard.rank, shard.world, distributed.get_rank(), distributed.get_world_size()]
    found: dict[str, Any] = {"shard": ranks}
    dataset = FastImageFolder(folder / "photos", RANDOM, threads=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train = FastLoader(dataset, 2, shuffle=True, seed=SEED, shard=shard)
        found["train"] = [[seen_in(batch) for batch in train] for _ in range(2)]
        found["length"] = len(train)
        found["eval"] = [seen_in(batch) for batch in FastLoader(dataset, 2, shard=Shard.auto("eval"))]
        only_here = FastLoader(dataset, 2, shard=shard)  # as for a validation that rank 0 does alone
        found["alone"] = len(list(only_here)) if shard.rank == 0 else None
        found["warned"] = warned(caught)
    # One collective for each batch: uneven counts would hang here, or pair different batches.
    for batch in found["train"][0]:
        total = torch.tensor([len(batch)])
        distributed.all_reduce(total)
        assert int(total) == len(batch) * shard.world
    distributed.barrier()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        wrong = FastLoader(dataset, 2, shuffle=True, seed=shard.rank, shard=shard)
        iter(wrong)
        distributed.barrier()  # every rank has said what it has
        iter(wrong)
        iter(wrong)
        found["disagree"] = warned(caught)
    _write(folder, shard.rank, found)
    distributed.barrier()
    distributed.destroy_process_group()


def _lightning(folder: Path) -> None:
    """Fit, predict and fit on two batches, with ``shard=`` and without."""
    warnings.simplefilter("ignore")  # Lightning's advice: more workers, a logger …
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    found = {}
    for name, stage, shard, options in (
        ("fit", "fit", None, {}), ("fit, shard", "fit", Shard(rank, 2), {}),
        ("predict", "predict", None, {}), ("predict, shard", "predict", Shard(rank, 2), {}),
        ("two batches", "fit", Shard(rank, 2), {"overfit_batches": 2}),
    ):  # fmt: skip
        trainer = trainer_of(folder, devices=2, strategy="ddp", **options)
        module = lightning_module()
        photos = FastImageFolder(folder / "photos", RANDOM, seed=SEED)
        loader = FastLoader(photos, batch_size=4, shuffle=stage == "fit", shard=shard)
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
    _write(folder, rank, found)


def _accelerate(folder: Path) -> None:
    """``prepare`` over processes: parts, gathering, saving."""
    from accelerate import Accelerator, DataLoaderConfiguration

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    found: dict[str, Any] = {}
    photos = FastImageFolder(folder / "photos", RANDOM, seed=SEED)
    loader: Any = prepare(accelerator, FastLoader(photos, batch_size=4, shuffle=True))
    kind, is_added = type(loader).__mro__[1].__name__, accelerator._dataloaders == [loader]
    found["kinds"] = [kind, loader.seed, len(loader), is_added]
    found["photos"] = [seen_in(batch) for batch in loader]
    for length in (19, 10, 16, 1):
        evaluated = prepare(accelerator, torch.utils.data.DataLoader(Rows(length), batch_size=4))
        gathered = torch.cat([accelerator.gather_for_metrics(batch) for batch in evaluated])
        found[f"gathered {length}"] = gathered.flatten().int().tolist()
    accelerator.free_memory()
    model = torch.nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    loader = prepare(accelerator, rows(43))
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
    _write(folder, accelerator.process_index, found)
    accelerator.end_training()


def _refused(accelerator: Any) -> list[str]:
    data = Rows()
    cases: list[Callable[[], Any]] = [
        lambda: FastLoader(data, 4, shuffle=True),
        lambda: torch.utils.data.DataLoader(data, 4, shuffle=True),
        lambda: FastLoader(data, 4, sampler=[3, 1, 2], seed=1),
        lambda: FastLoader(data, batch_sampler=[[3, 1], [2]], seed=1),
        lambda: FastLoader(data, 4, shard=Shard(0, 3)),
        lambda: FastLoader(data, None),
    ]
    return [_error(lambda make=make: prepare(accelerator, make())) for make in cases]


def _error(call: Callable[[], Any]) -> str:
    try:
        call()
    except OptionError as error:
        return str(error)
    return ""


def _resume(folder: Path) -> None:
    """The rest of the epoch that ``accelerate`` has saved, gathered from any number of processes."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    loader = prepare(accelerator, rows(43))
    accelerator.load_state(folder / "state")
    rest, after = (numbers(accelerator.gather_for_metrics(batch) for batch in loader) for _ in range(2))
    _write(folder, accelerator.process_index, {"rest": rest, "after": after})
    accelerator.end_training()


def _hugging_face(folder: Path) -> None:
    """Hugging Face's Trainer, as it is and accelerated; each resumes in its second epoch."""
    changes: dict[str, Callable[[Any], Any]] = {"stock": lambda trainer: trainer, "fast": accelerate_trainer}
    found = {name: seen_by_trainers(folder / name, change, [3]) for name, change in changes.items()}
    _write(folder, int(os.environ["RANK"]), found)


if __name__ == "__main__":
    torch.set_num_threads(1)
    modes = {
        "shard": _shard, "lightning": _lightning, "accelerate": _accelerate, "resume": _resume,
        "hugging_face": _hugging_face,
    }  # fmt: skip
    modes[sys.argv[1]](Path(sys.argv[2]))
