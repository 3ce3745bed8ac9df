"""Transforms that fastpipe's plan does not know, run as they are, reproducibly.

A sample's random numbers must depend on its key and not on which thread runs it, or when.
There are two ways to get that:

* :func:`run_keyed` leaves every global generator alone: a ``TorchFunctionMode``, which only
  its own thread sees, hands a generator of the sample's own to every draw made through
  torch.  So any number of threads may use it at the same time.  It is for transforms that
  draw through torch only; :data:`THREAD_SAFE` lists those that are known to.
* :func:`run_seeded` seeds the global generators of torch (CPU), Python and NumPy and puts
  them back afterwards.  It is for any callable, and for one thread at a time.

Both give a transform of :data:`THREAD_SAFE` the same numbers for the same seed: those it
would draw right after ``torch.manual_seed(seed)``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torchvision import transforms as v1
from torchvision.transforms import v2

from fastpipe.core.keys import sample_seed
from fastpipe.images.containers import is_pristine

__all__ = [
    "THREAD_SAFE",
    "KeyedGenerator",
    "is_thread_safe",
    "preserved_generators",
    "run_keyed",
    "run_seeded",
    "seed_generators",
    "stock_note",
]

Transform = Callable[[Any], Any]

_SEED_LIMIT = 1 << 64


class KeyedGenerator(TorchFunctionMode):
    """While active, torch's random draws in this thread come from a generator of its own.

    Covered are the functions and tensor methods that draw: ``rand``, ``randn``, ``randint``,
    ``randperm``, ``normal``, ``bernoulli``, ``multinomial``, ``poisson``, ``binomial``, their
    ``_like`` relatives, the in-place ``uniform_``, ``normal_``, ``random_``, ``bernoulli_``,
    ``exponential_``, ``cauchy_``, ``geometric_`` and ``log_normal_``, and what
    ``torch.distributions`` makes of them.  A draw that names its generator keeps it.  Draws
    on another device than the CPU get a generator there, seeded alike.

    Not covered, so still drawn from the global generators: Python's ``random``, NumPy,
    ``torch.ops`` called directly, and draws inside functions that torch itself hides from
    modes (``torch.nn.functional.dropout`` and its kind, ``gumbel_softmax``, ``rrelu``,
    ``fractional_max_pool``, ``torch.nn.init``).

    Args:
        seed: any integer, taken modulo 2**64; of that, torch's CPU generator uses the lower
            32 bits.  Or a function that gives it, called when something is drawn.

    >>> with KeyedGenerator(7):
    ...     first = torch.rand(3)
    >>> torch.equal(first, torch.rand(3, generator=torch.Generator().manual_seed(7)))
    True
    """

    def __init__(self, seed: int | Callable[[], int]) -> None:
        super().__init__()
        self._seed = seed
        self._generators: dict[str, torch.Generator] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _DRAWS or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        if any(isinstance(arg, torch.Generator) for arg in args):
            return func(*args, **kwargs)
        device = _device_of(args, kwargs)
        if device.type == "meta":
            return func(*args, **kwargs)
        kwargs = {**kwargs, "generator": self._generator(device)}
        return _LIKE[func](*args, **kwargs) if func in _LIKE else func(*args, **kwargs)

    def _generator(self, device: torch.device) -> torch.Generator:
        name = str(device)
        if name not in self._generators:
            seed = self._seed() if callable(self._seed) else self._seed
            self._generators[name] = torch.Generator(device).manual_seed(seed % _SEED_LIMIT)
        return self._generators[name]


def _device_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    """Where a call draws: on its ``device``, else that of its first tensor, else the default."""
    if kwargs.get("device") is not None:
        return torch.device(kwargs["device"])
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            return value.device
    return torch.get_default_device()


def _fill_like(fill: Callable[..., torch.Tensor], like: torch.Tensor, **options: Any) -> torch.Tensor:
    """What ``rand_like`` and its kind do, which take a generator only in newer versions of torch."""
    generator = options.pop("generator")
    requires_grad = options.pop("requires_grad", False)
    filled = fill(torch.empty_like(like, **options), generator=generator)
    return filled.requires_grad_() if requires_grad else filled


def _rand_like(input: torch.Tensor, **options: Any) -> torch.Tensor:
    return _fill_like(torch.Tensor.uniform_, input, **options)


def _randn_like(input: torch.Tensor, **options: Any) -> torch.Tensor:
    return _fill_like(torch.Tensor.normal_, input, **options)


def _randint_like(input: torch.Tensor, *bounds: int, **options: Any) -> torch.Tensor:
    named = (options.pop(name) for name in ("low", "high") if name in options)
    low, high = (0, *bounds, *named)[-2:]

    def fill(empty: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return empty.random_(low, high, generator=generator)

    return _fill_like(fill, input, **options)


_LIKE: dict[Any, Callable[..., torch.Tensor]] = {
    torch.rand_like: _rand_like,
    torch.randn_like: _randn_like,
    torch.randint_like: _randint_like,
}

_FUNCTIONS = """
    rand randn randint randperm normal bernoulli multinomial poisson binomial
    _standard_gamma _sample_dirichlet
"""
_METHODS = """
    uniform_ normal_ random_ bernoulli_ exponential_ cauchy_ geometric_ log_normal_
    bernoulli multinomial
"""
_DRAWS = frozenset(
    {
        *(getattr(torch, name) for name in _FUNCTIONS.split()),
        *(getattr(torch.Tensor, name) for name in _METHODS.split()),
        *_LIKE,
    }
)


def run_keyed(transforms: Sequence[Transform], value: Any, seed: int | Callable[[], int]) -> Any:
    """Apply transforms in order, their draws through torch coming from ``seed`` alone.

    For any thread, at any time: the values do not depend on what other threads do, and no
    global generator is read or changed, given transforms for which :func:`is_thread_safe`
    is true (or whose author says so).

    Args:
        transforms: callables of one argument.
        value: what the first one gets: a PIL image, a tensor, or any structure they accept.
        seed: any integer, taken modulo 2**64, such as ``fastpipe.core.keys.sample_seed``
            gives; or a function that gives it, called when a transform draws.

    Returns:
        What the last transform returned; ``value`` when there is none.

    >>> flip = v2.RandomHorizontalFlip()
    >>> image = torch.arange(3).reshape(1, 1, 3)
    >>> [run_keyed([flip], image, seed).flatten().tolist() for seed in (0, 1)]
    [[2, 1, 0], [0, 1, 2]]
    """
    with KeyedGenerator(seed):
        for transform in transforms:
            value = transform(value)
    return value


def run_seeded(transforms: Sequence[Transform], value: Any, seed: int) -> Any:
    """Apply any transforms in order, with the global generators seeded from ``seed``.

    Seeded, and restored afterwards (also when a transform raises): torch's CPU generator,
    Python's ``random`` and NumPy's ``numpy.random``.  torch's generators on other devices
    are left alone: transforms that draw on a GPU are not reproduced.

    For one thread at a time, in a process whose other threads do not draw from the global
    generators meanwhile.  It costs about 0.1 ms, most of it for saving and restoring NumPy's
    state; to apply it to many samples, save once with :func:`preserved_generators` and call
    :func:`seed_generators` for each.

    Args:
        transforms: callables of one argument.
        value: what the first one gets.
        seed: any integer, taken modulo 2**64.

    Returns:
        What the last transform returned; ``value`` when there is none.

    >>> run_seeded([lambda x: x + random.random()], 1, 5) == run_seeded([lambda x: x + random.random()], 1, 5)
    True
    """
    with preserved_generators():
        seed_generators(seed)
        for transform in transforms:
            value = transform(value)
    return value


@contextmanager
def preserved_generators() -> Iterator[None]:
    """Put the global generators of torch (CPU), Python and NumPy back as they were found.

    >>> with preserved_generators():
    ...     seed_generators(3)
    """
    torch_state = torch.default_generator.get_state()
    python_state = random.getstate()
    numpy_state = np.random.get_state(legacy=False)
    try:
        yield
    finally:
        torch.default_generator.set_state(torch_state)
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def seed_generators(seed: int) -> None:
    """Seed the global generators of torch (CPU), Python and NumPy from one integer.

    Args:
        seed: any integer, taken modulo 2**64.  torch gets the seed itself, as from
            ``torch.manual_seed``; the other two get seeds derived from it, since Python and
            NumPy would draw the very same numbers from one seed.
    """
    torch.default_generator.manual_seed(seed % _SEED_LIMIT)
    random.seed(sample_seed(seed, 0, 0))
    words = sample_seed(seed, 0, 1)
    np.random.seed([words & 0xFFFF_FFFF, words >> 32])


def is_thread_safe(transforms: Sequence[Transform]) -> bool:
    """Whether :func:`run_keyed` reproduces these transforms from any thread.

    Args:
        transforms: callables.  Containers (``Compose``, ``RandomApply``, ``nn.Sequential``, and
            v2's ``RandomChoice`` and ``RandomOrder``) are as good as what they hold.

    Returns:
        True when all are exactly of a type in :data:`THREAD_SAFE` (a subclass may do
        anything) and unmodified: without hooks, and without methods replaced on object or class.

    >>> is_thread_safe([v1.Compose([v1.ColorJitter(0.4), v1.ToTensor()])])
    True
    >>> is_thread_safe([v1.Lambda(lambda image: image)])
    False
    """
    return all(map(_is_safe, transforms))


def stock_note(is_promised: bool, stock: Sequence[Any]) -> str:
    """How transforms run that the plan does not know, in words.

    Args:
        is_promised: whether the script says that several threads may call them.
        stock: the transforms.
    """
    if is_promised:
        return "as it is, in threads (thread_safe=True)"
    if is_thread_safe(stock):
        return "torchvision, in threads, with a generator for each sample"
    return "as it is, one sample after the other: fastpipe does not know it, or what follows it"


def _is_safe(transform: Any) -> bool:
    # Hooks and replaced methods are someone's code, of which nothing is known.
    if type(transform) not in THREAD_SAFE or not is_pristine(transform):
        return False
    if type(transform) in _CONTAINERS:
        children: Iterable[Any] = getattr(transform, "transforms", transform)
        return all(map(_is_safe, children))
    return True


def _named(module: Any, names: str) -> frozenset[type]:
    """Those of the classes that the installed torchvision has."""
    return frozenset(getattr(module, name) for name in names.split() if hasattr(module, name))


_CONTAINERS = (
    _named(v1, "Compose RandomApply")
    | _named(v2, "Compose RandomApply RandomChoice RandomOrder")
    | {torch.nn.Sequential}
)

# In both generations of torchvision's transforms.
_SHARED = """
    AugMix AutoAugment CenterCrop ColorJitter ConvertImageDtype ElasticTransform FiveCrop
    GaussianBlur Grayscale LinearTransformation Normalize PILToTensor Pad RandAugment
    RandomAdjustSharpness RandomAffine RandomAutocontrast RandomCrop RandomEqualize RandomErasing
    RandomGrayscale RandomHorizontalFlip RandomInvert RandomPerspective RandomPosterize
    RandomResizedCrop RandomRotation RandomSolarize RandomVerticalFlip Resize TenCrop ToPILImage
    ToTensor TrivialAugmentWide
"""
_ONLY_V2 = """
    ClampBoundingBoxes ConvertBoundingBoxFormat GaussianNoise Identity JPEG RGB
    RandomChannelPermutation RandomIoUCrop RandomPhotometricDistort RandomResize
    RandomShortestSize RandomZoomOut ScaleJitter ToDtype ToImage ToPureTensor
    UniformTemporalSubsample
"""

THREAD_SAFE: frozenset[type] = _CONTAINERS | _named(v1, _SHARED) | _named(v2, _SHARED + _ONLY_V2)
"""Types that draw through torch alone, where :class:`KeyedGenerator` sees it, or not at all.

Exact types of ``torchvision.transforms`` and ``torchvision.transforms.v2``; each is run in
threads and compared with a serial run in fastpipe's tests.  Not among them: ``RandomChoice``
and ``RandomOrder`` of the first generation (they draw from Python's ``random``), ``Lambda``
and whatever else takes a function, and transforms of batches (``MixUp``, ``CutMix``).
"""
