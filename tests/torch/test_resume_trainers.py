"""Each trainer's own way to resume gives the samples of a run that was never stopped, or an error."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from streams import Rounds, plain, stream
from torch.utils.data import DataLoader, RandomSampler
from trainer_ranks import RANDOM, lightning_module, trainer_of

from fastpipe import BadSamples, FastImageFolder, FastLoader, Shuffle
from fastpipe.bench.synthetic import photo_tree
from fastpipe.errors import OptionError
from fastpipe.torch import prepare

_WHY = "needs the trainers: pip install lightning accelerate (make venv installs both)"
pl = pytest.importorskip("lightning.pytorch", reason=_WHY)
accelerate = pytest.importorskip("accelerate", reason=_WHY)

pytestmark = pytest.mark.usefixtures("same_generators")

EPOCHS, SAMPLES, SIZE, BATCHES = 3, 11, 3, 4
DATA = list(range(SAMPLES))


def numbers(**options: Any) -> FastLoader[Any]:
    return FastLoader(DATA, SIZE, **options)


def images(path: Path, seed: int | None = 3, **options: Any) -> FastLoader[Any]:
    return FastLoader(FastImageFolder(path, RANDOM, seed=seed), SIZE, shuffle=True, **options)


def with_generator(**options: Any) -> FastLoader[Any]:
    generator = torch.Generator().manual_seed(5)
    return numbers(sampler=RandomSampler(DATA, generator=generator), generator=generator, **options)


LOADERS: dict[str, Callable[[Path], FastLoader[Any]]] = {
    "seed": lambda path: numbers(shuffle=True, seed=2),
    "in order": lambda path: numbers(),
    "shuffle": lambda path: numbers(shuffle=True),
    "generator": lambda path: numbers(shuffle=True, generator=torch.Generator().manual_seed(5)),
    "sampler": lambda path: with_generator(),
    "own sampler": lambda path: numbers(sampler=Rounds()),
    "workers": lambda path: with_generator(num_workers=1, persistent_workers=True),
    "photos, seed": lambda path: images(path),
    "photos": lambda path: images(path, None),
    "photos of a seed with workers": lambda path: images(path, num_workers=1, workers="processes"),
}


def accelerated(
    make: Callable[[], FastLoader[Any]], folder: Path, stop: tuple[int, Any] | None, resumes: bool, how: str
) -> list[Any]:
    """A script after Accelerate's ``checkpointing.py``; stops behind a batch of an epoch, or its end."""
    torch.manual_seed(1)
    accelerator = accelerate.Accelerator(cpu=True)
    loader, found, first, step = prepare(accelerator, make()), [], 0, 0

    def save(epoch: int, batches: int) -> None:
        accelerator.save_state(folder)
        (folder / "where").write_text(json.dumps(divmod(epoch * BATCHES + batches, BATCHES)))

    if resumes:
        accelerator.load_state(folder)
        first, step = json.loads((folder / "where").read_text())
    for epoch in range(first, EPOCHS):
        if how == "set_epoch":
            loader.set_epoch(epoch)
        batches, skipped = loader, step if resumes and epoch == first else 0
        if resumes and epoch == first and how != "just iterate":
            batches = accelerator.skip_first_batches(loader, step)
            assert len(batches) == BATCHES - step
        for number, batch in enumerate(batches, 1):
            found.append([plain(batch), float(torch.rand(()))])
            if stop == (epoch, number):
                save(epoch, number + skipped)
                break
        if stop is not None and stop[0] == epoch:
            if stop[1] == "over":
                save(epoch + 1, 0)
            break
    accelerator.free_memory()
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize("how", ["skip", "set_epoch", "just iterate"])
@pytest.mark.parametrize("name", LOADERS)
def test_accelerates_recipe_resumes_exactly(eleven: Path, tmp_path: Path, name: str, how: str) -> None:
    """Behind each batch, and again in the epoch that was resumed; what the model draws is the same too."""

    def run(stop: Any = None, resumes: bool = False) -> list[Any]:
        return accelerated(lambda: LOADERS[name](eleven), tmp_path, stop, resumes, how)

    whole = run()
    assert len(whole) == EPOCHS * BATCHES
    for stop in [(0, 1), (0, BATCHES), (1, 3), (1, "over")]:
        assert run(stop) + run(resumes=True) == whole, stop
    assert run((1, 1)) + run((1, 2), resumes=True) + run(resumes=True) == whole


def test_skipping_without_a_state_counts_from_the_next_epoch(accelerator: Any) -> None:
    loader = prepare(accelerator, LOADERS["seed"](Path()))
    epochs = [stream(loader) for _ in range(4)]
    again = prepare(accelerator, LOADERS["seed"](Path()))
    rest = accelerator.skip_first_batches(again, 3)
    assert [stream(rest), stream(rest)] == [epochs[0][3:], epochs[1][3:]]
    assert stream(accelerator.skip_first_batches(again, 9)) == [] and stream(again) == epochs[3]
    assert rest.batch_size == SIZE and rest.state_dict() == again.state_dict()
    again.set_epoch(1)
    assert stream(accelerator.skip_first_batches(again, 1)) == epochs[1][1:]
    # Another loader's is Accelerate's own.
    stock = accelerator.prepare(DataLoader(DATA, SIZE))
    assert [batch.tolist() for batch in accelerator.skip_first_batches(stock, 3)] == [[9, 10]]


@pytest.mark.parametrize("name", ["seed", "generator", "own sampler", "photos"])
def test_more_or_fewer_batches_than_the_state_says_can_be_skipped(
    eleven: Path, accelerator: Any, name: str
) -> None:
    torch.manual_seed(1)
    loader = prepare(accelerator, LOADERS[name](eleven))
    found = [(plain(batch), loader.state_dict()) for batch in loader]
    following = stream(loader)
    for count in range(BATCHES + 1):
        loader.load_state_dict(found[1][1])
        assert stream(accelerator.skip_first_batches(loader, count)) == [batch for batch, _ in found[count:]]
    assert stream(loader) == following


def test_skipping_that_cannot_be_exact_is_an_error(eleven: Path, tmp_path: Path, accelerator: Any) -> None:
    def refused(match: str, loader: Any, count: int = 2) -> None:
        with pytest.raises(OptionError, match=match):
            list(accelerator.skip_first_batches(loader, count))

    for name in ("shuffle", "generator", "photos"):
        refused(r"whose order is drawn.*give the loader a seed=", prepare(accelerator, LOADERS[name](eleven)))
    refused("must be from 0, got -1", prepare(accelerator, LOADERS["seed"](eleven)), -1)
    bad = photo_tree(tmp_path / "bad", classes=4, per_class=3, sizes=(16, 20))
    sorted(bad.rglob("*.jpg"))[4].write_bytes(b"not an image")
    dataset = FastImageFolder(bad, RANDOM, bad_samples=BadSamples("skip"))
    loader = prepare(accelerator, FastLoader(dataset, SIZE, shuffle=True, seed=2))
    refused("bad_samples='skip' fills batches up: load", loader)
    found = [(plain(batch), loader.state_dict()) for batch in loader]
    loader.load_state_dict(found[1][1])
    assert stream(accelerator.skip_first_batches(loader, 2)) == [batch for batch, _ in found[2:]]
    loader.load_state_dict(found[1][1])
    refused("load the loader's state, and skip as many", loader, 1)
    # Accelerate's function would make a plain loader, without device, seed and augmentation.
    stock = accelerate.skip_first_batches(prepare(accelerator, LOADERS["photos, seed"](eleven)), 2)
    with pytest.raises(OptionError, match=r"use accelerator\.skip_first_batches\(loader, number\)"):
        next(iter(stock))


@pytest.mark.parametrize("shuffle", [True, Shuffle(unit="sample")])
def test_hugging_faces_trainer_resumes_exactly(shuffle: Any) -> None:
    """Its loop skips by ``accelerate.skip_first_batches``, without a state, and then sets the epoch's number, of
    what has such a method; with ``ignore_data_skip`` it begins the epoch anew."""

    def run(first: int, step: int) -> list[Any]:
        loader, found = numbers(shuffle=shuffle, seed=2), []
        for epoch in range(first, EPOCHS):
            skips = step and epoch == first
            batches: Any = accelerate.skip_first_batches(loader, step) if skips else loader
            for one in (batches, getattr(batches.batch_sampler, "batch_sampler", None)):
                if hasattr(one, "set_epoch"):
                    one.set_epoch(epoch)
            found += stream(batches)
        return found

    whole = run(0, 0)
    for epoch, step in [(0, 2), (1, 0), (1, 1), (1, 3), (2, 2)]:
        assert run(epoch, step) == whole[epoch * BATCHES + step :]


def test_a_loader_that_accelerate_made_plain_has_the_seeds_order(accelerator: Any) -> None:
    """Also once the loader that it was made of is gone."""
    expected, made = LOADERS["seed"](Path()), accelerator.prepare(LOADERS["seed"](Path()))
    for _ in range(EPOCHS):
        assert stream(made) == stream(expected)


def test_batches_of_a_loader_that_is_not_prepared_can_be_skipped() -> None:
    loader, again = LOADERS["seed"](Path()), LOADERS["seed"](Path())
    epochs = [stream(loader) for _ in range(2)]
    next(iter(again))
    again.load_state_dict(again.state_dict())
    assert stream(accelerate.skip_first_batches(again, 1)) == epochs[0][1:], "the epoch of the state"
    assert stream(again) == epochs[1]


class SaveEach(pl.Callback):
    """Checkpoints after each batch, validation and epoch."""

    def _save(self, name: str, trainer: Any, *_: Any) -> None:
        if not trainer.sanity_checking:
            trainer.save_checkpoint(f"{trainer.default_root_dir}/{name}-{trainer.global_step}.ckpt")

    on_train_batch_end = partialmethod(_save, "step")
    on_validation_end = partialmethod(_save, "validation")
    on_train_epoch_end = partialmethod(_save, "epoch")


def fit(make: Callable[[], Any], folder: Path, start: Path | None = None, **options: Any) -> list[Any]:
    torch.manual_seed(1)
    trainer = trainer_of(folder, *([] if start else [SaveEach()]), max_epochs=EPOCHS, **options)
    module = lightning_module(lambda batch: (module.current_epoch, plain(batch)))
    trainer.fit(module, make(), DataLoader(DATA, 4), ckpt_path=start, weights_only=False)
    found: list[Any] = module.seen
    return found


@pytest.mark.filterwarnings(
    "ignore:.*does not have many workers", "ignore:.*LeafSpec.* is deprecated:FutureWarning"
)
@pytest.mark.few(4)
@pytest.mark.parametrize("options", [{}, {"val_check_interval": 2}, {"limit_val_batches": 0}], ids=str)
@pytest.mark.parametrize("name", [name for name in LOADERS if name != "photos of a seed with workers"])
def test_lightning_resumes_exactly(eleven: Path, tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    make = partial(LOADERS[name], eleven)
    whole = fit(make, tmp_path, **options)
    # Of a checkpoint from ``on_train_epoch_end`` Lightning may load no loader's state; a seed does without.
    kinds = ("step", "validation", *(["epoch"] if "seed" in name or name == "in order" else []))
    for path in [path for kind in kinds for path in tmp_path.glob(f"{kind}-*.ckpt")]:
        step = int(path.stem.split("-")[1])
        # Validation draws from torch's generator at an epoch's end, before augmentation without a seed does.
        if step in (1, 6) or (step == BATCHES and name != "photos"):
            assert fit(make, tmp_path, path, **options) == whole[step:], path.name
    if name in ("shuffle", "photos") and "limit_val_batches" in options:
        with pytest.warns(UserWarning, match="begins with epoch"):
            fit(make, tmp_path, tmp_path / "epoch-4.ckpt", **options)


@pytest.mark.parametrize("name", ["seed", "shuffle", "generator", "sampler", "photos, seed"])
def test_composers_way_resumes_exactly(eleven: Path, name: str) -> None:
    """Each epoch that is over is begun and left, and of this one so many batches are dropped.  A sampler draws
    at an epoch's end as well, from a generator of its own: those are as with torch's loader."""

    def run(make: Callable[[], Any], first: int, step: int) -> list[Any]:
        torch.manual_seed(1)
        loader = make()
        for _ in range(first):
            next(iter(loader))
        return [batch for _ in range(first, EPOCHS) for batch in stream(loader)][step:]

    make = partial(LOADERS[name], eleven)
    whole = run(make, 0, 0)
    for first, step in [(0, 2), (1, 0), (2, 1)]:
        if name in ("generator", "sampler"):
            assert run(make, first, step) == run(lambda: make().reference(), first, step)
        else:
            assert run(make, first, step) == whole[first * BATCHES + step :]
