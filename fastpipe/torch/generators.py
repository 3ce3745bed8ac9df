"""The global random generators, left alone or put back, while code that draws from them runs reproducibly.

A sample's random numbers must depend on its key and not on which thread runs it, or when.
There are two ways to get that:

* :func:`run_keyed` leaves every global generator alone: a ``TorchFunctionMode``, which only
  its own thread sees, hands a generator of the sample's own to every draw made through
  torch.  So any number of threads may use it at the same time.  It is for transforms that
  draw through torch only, such as those of ``torch/stock.py``.
* :func:`run_seeded` seeds the global generators of torch (CPU), Python and NumPy and puts
  them back afterwards.  It is for any callable, and for one thread at a time.

Both give a transform that draws through torch only the same numbers for the same seed: those it would draw
right after ``torch.manual_seed(seed)``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from fastpipe.core.keys import sample_seed

__all__ = ["KeyedGenerator", "preserved_generators", "run_keyed", "run_seeded", "seed_generators"]

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
        self._generators: dict[tuple[str, int], torch.Generator] = {}

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
        key = device.type, _index_of(device)
        if key not in self._generators:
            seed = self._seed() if callable(self._seed) else self._seed
            self._generators[key] = torch.Generator(device).manual_seed(seed % _SEED_LIMIT)
        return self._generators[key]


def _device_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    """Where a call draws: on its ``device``, else that of its first tensor, else the default."""
    if kwargs.get("device") is not None:
        return torch.device(kwargs["device"])
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            return value.device
    return torch.get_default_device()


def _index_of(device: torch.device) -> int:
    """Which of its kind a device is: without a number the current one."""
    if device.type == "cpu":
        return 0
    index = torch.empty(0, device=device).device.index if device.index is None else device.index
    return index or 0


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
    global generator is read or changed, given transforms that draw
    through torch only.

    Args:
        transforms: callables of one argument.
        value: what the first one gets: a PIL image, a tensor, or any structure they accept.
        seed: any integer, taken modulo 2**64, such as ``fastpipe.core.keys.sample_seed``
            gives; or a function that gives it, called when a transform draws.

    Returns:
        What the last transform returned; ``value`` when there is none.

    >>> from torchvision.transforms import v2
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
