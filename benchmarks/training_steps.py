"""Training steps of ResNet-50 on a GPU, by what feeds them: steps a second, and what they lose to waiting.

::

    python benchmarks/training_steps.py --data FOLDER --json training-steps.json

bfloat16, channels last, batches of 256; photographs are cropped at random, resized to 224 and mirrored.
fastpipe's loaders send or make uint8 batches, which are normalised on the device; the replaced loader sends
normalised float32 from pinned memory.  Each measurement is 40 steps after 10 that do not count, rounds take
turns, and *stall* is the part of a step's time that it would not take if its batch were always on the device:
one less the ratio to that row in the same round.  Needs torch and torchvision; decoding on the GPU also
nvImageCodec, and is left out with a note where that is not installed.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
import torchvision
from rounds import add_photo_options, figures, photos_of, save_facts

from fastpipe import Decode
from fastpipe.bench.data import Photos
from fastpipe.bench.images import MEAN, STD, LoaderRow, LoaderSpec, why_not_installed
from fastpipe.bench.runner import touch
from fastpipe.core.machine import available_cpus

_CEILING = "a batch that is always there"
_CLASSES = 1000


class Trainer:
    """Steps of ResNet-50 in bfloat16, channels last.

    Args:
        device: ``"cuda"``, or ``"cpu"`` to see whether the script runs.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        model = torchvision.models.resnet50(weights=None, num_classes=_CLASSES)
        self._model: Any = model.to(device, memory_format=torch.channels_last).train()
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-3, momentum=0.9)
        shape = (1, 3, 1, 1)
        self._mean = 255 * torch.tensor(MEAN, device=device).view(shape)
        self._scale = 1 / (255 * torch.tensor(STD, device=device).view(shape))

    def __call__(self, batch: Any) -> int:
        """Start a training step on a batch, on any device, and return the batch's number of images."""
        images, labels = (tensor.to(self.device, non_blocking=True) for tensor in batch)
        images = images.contiguous(memory_format=torch.channels_last)
        with torch.autocast(self.device, dtype=torch.bfloat16):
            if images.dtype == torch.uint8:
                images = (images.float() - self._mean) * self._scale
            loss: Any = torch.nn.functional.cross_entropy(self._model(images), labels.long())
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self._optimizer.step()
        return len(labels)

    def wait(self) -> None:
        """Wait until the device has done everything."""
        if self.device == "cuda":
            torch.cuda.synchronize()


def loader_specs(device: str, cores: int, workers: int) -> list[LoaderSpec]:
    """Return the loaders."""
    fast = "FastImageFolder + FastLoader"
    on_gpu, shared = Decode("nvimgcodec"), Decode("nvimgcodec", gpu_share="auto")
    return [
        LoaderSpec("stock", f"ImageFolder + DataLoader(num_workers={workers})", "replaced", workers,
                   "float32", device=device),
        LoaderSpec("cpu", f"{fast}, decoded by {cores} cores", "fastpipe", 0, "uint8", device=device),
        LoaderSpec("process", f"{fast}(num_workers=1), decoded by {cores} cores", "fastpipe", 1, "uint8",
                   device=device),
        LoaderSpec("gpu", f'{fast}, Decode("nvimgcodec")', "fastpipe", 0, "uint8",
                   decode=on_gpu, device=device),
        LoaderSpec("auto", f'{fast}, Decode("nvimgcodec", gpu_share="auto")', "fastpipe", 0, "uint8",
                   decode=shared, device=device),
    ]  # fmt: skip


def steps_per_s(batches: Iterable[Any], trainer: Trainer, lead: int, steps: int) -> tuple[float, float]:
    """Train; return steps per second after the lead, and the part of the time spent waiting for batches."""
    iterator, waited, start = iter(batches), 0.0, 0.0
    for number in range(lead + steps):
        if number == lead:
            trainer.wait()
            start, waited = time.perf_counter(), 0.0
        asked = time.perf_counter()
        batch = next(iterator)
        waited += time.perf_counter() - asked
        trainer(batch)
    trainer.wait()
    seconds = time.perf_counter() - start
    for _ in iterator:  # the epoch ends, and leaves nothing that works beside the next row
        pass
    return steps / seconds, waited / seconds


def loaded_alone(row: LoaderRow, batch: int, lead: int, steps: int) -> float:
    """Return the images per second of a loader alone, without training."""
    start = 0.0
    for number, made in enumerate(row.batches(batch * (lead + steps))):
        if number == lead:
            start = time.perf_counter()
        touch(made)
    return (steps - 1) * batch / (time.perf_counter() - start)


def measured(
    photos: Photos, args: argparse.Namespace, trainer: Trainer, cores: int
) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    """Measure all rows in turn; return them, and those that could not be measured with the reason."""
    device, batch, lead, steps = trainer.device, args.batch, args.lead, args.steps
    missing: list[dict[str, str]] = []

    def miss(spec: LoaderSpec, why: object) -> None:
        missing.append({"key": spec.key, "label": spec.label, "why": str(why)})
        print(f"not measured: {spec.label}: {why}", flush=True)

    with ExitStack() as stack:
        rows: dict[str, LoaderRow] = {}
        alone: dict[str, float] = {}
        specs = loader_specs(device, cores, args.workers or cores)
        specs = [spec for spec in specs if not args.only or spec.key in args.only]
        for spec in sorted(specs, key=lambda one: -one.num_workers):  # processes are forked first
            if why := why_not_installed(spec):
                miss(spec, why)
                continue
            if spec.decode.backend == "nvimgcodec" and device != "cuda":
                miss(spec, "needs a GPU")
                continue
            try:
                row = LoaderRow(spec, photos.folder, photos.indices, batch)
                stack.callback(row.close)
                alone[spec.key] = loaded_alone(row, batch, max(2, spec.num_workers), steps)
            except Exception as error:  # a library without its part for GPUs: the others go on
                miss(spec, f"{type(error).__name__}: {error}")
                continue
            rows[spec.key] = row
        generator = torch.Generator().manual_seed(0)
        pixels = torch.randint(0, 256, (batch, 3, 224, 224), dtype=torch.uint8, generator=generator)
        labels = torch.randint(0, _CLASSES, (batch,), generator=generator)
        same = [pixels.to(device), labels.to(device)]
        feeds: dict[str, Callable[[], Iterable[Any]]] = {
            _CEILING: lambda: (same for _ in range(lead + steps))
        }
        feeds |= {
            key: lambda row=row: row.batches(batch * (lead + steps))  # type: ignore[misc]
            for key, row in rows.items()
        }
        steps_per_s([same] * 3, trainer, 2, 1)  # cuDNN chooses
        found: dict[str, list[tuple[float, float]]] = {key: [] for key in feeds}
        for number in range(args.rounds):
            for key in list(feeds)[:: 1 if number % 2 == 0 else -1]:
                gc.collect()
                found[key].append(steps_per_s(feeds[key](), trainer, lead, steps))
                print(f"round {number + 1}: {key}: {found[key][-1][0]:.2f} steps/s", flush=True)
    names = {spec.key: spec.label for spec in specs} | {_CEILING: _CEILING}
    ceiling, told = [rate for rate, _ in found[_CEILING]], []
    for key, pairs in found.items():
        rates = [rate for rate, _ in pairs]
        one: dict[str, Any] = {"key": key, "label": names[key], "steps_per_s": figures(rates, 3)}
        one["images_per_s"] = figures([rate * batch for rate in rates], 1)
        one["stall"] = figures([1 - rate / most for rate, most in zip(rates, ceiling, strict=True)], 4)
        one["waited"] = figures([part for _, part in pairs], 4)
        one["loader_alone_images_per_s"] = round(alone[key], 1) if key in alone else None
        told.append(one)
    return told, missing


def main() -> None:
    """Measure, print, and write the result file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_photo_options(parser, 3)
    parser.add_argument("--batch", type=int, default=256, help="images in a batch (default: 256)")
    parser.add_argument("--steps", type=int, default=40, help="that are measured (default: 40)")
    parser.add_argument("--lead", type=int, default=10, help="steps before the clock starts (default: 10)")
    parser.add_argument("--workers", type=int, help="of the replaced loader (default: as many as cores)")
    parser.add_argument("--only", nargs="+", help="loaders: stock, cpu, process, gpu, auto (default: all)")
    parser.add_argument(
        "--device", default="cuda", choices=("cuda", "cpu"), help="cpu only shows that it runs"
    )
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device: --device cpu shows that the script runs")
    photos, cores = photos_of(args), available_cpus()
    rows, missing = measured(photos, args, Trainer(args.device), cores)
    print(f"\nResNet-50, bfloat16, batches of {args.batch}, {args.steps} steps, {args.rounds} rounds")
    print(f"{'':64} {'steps/s':>8} {'images/s':>9} {'stall':>6}  {'range':>16} {'alone':>8}")
    for row in rows:
        stall, alone = row["stall"], row["loader_alone_images_per_s"]
        span = f"{stall['low']:.1%} to {stall['high']:.1%}"
        print(
            f"{row['label']:64} {row['steps_per_s']['median']:8.2f} {row['images_per_s']['median']:9,.0f} "
            f"{stall['median']:6.1%}  {span:>16} {'' if alone is None else format(alone, '8,.0f')}"
        )
    gpu = torch.cuda.get_device_name() if args.device == "cuda" else None
    about = {"gpu": gpu, "batch": args.batch, "steps": args.steps, "lead": args.lead, "rounds": args.rounds}
    save_facts(args.json, photos, about | {"rows": rows, "missing": missing})


if __name__ == "__main__":
    main()
