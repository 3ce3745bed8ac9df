"""Compare the samples of torchvision's dataset with fastpipe's: are they equal, different or unreadable?"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

import fastpipe
from fastpipe.bench.check import Check, index_problems
from fastpipe.bench.images import check_transform, train_transform
from fastpipe.core.caches import open_cache_store
from fastpipe.core.extras import require
from fastpipe.core.files import require_regular
from fastpipe.core.types import Key
from fastpipe.errors import BadSampleError, OptionError
from fastpipe.options import Cache


class Chain(NamedTuple):
    name: str
    about: str
    transform: Any
    batch: int
    is_own: bool = False


# By name: a description of the steps, a function that makes the transform, and the batch size.
NAMED: dict[str, tuple[str, Callable[[], Any], int]] = {
    "eval": ("Resize(256), CenterCrop(224), PILToTensor()", check_transform, 32),
    "train": (
        "RandomResizedCrop(224), RandomHorizontalFlip(), PILToTensor(), with the same draws in both",
        partial(train_transform, "uint8"), 32,
    ),
    # Without a transform, both would return Pillow's image.  The fast decoder makes only tensors.
    "none": (
        "PILToTensor(): every pixel at full size",
        lambda: require("torchvision", extra="torch").transforms.PILToTensor(), 1,
    ),
}  # fmt: skip


def chain_of(name: str) -> Chain:
    if name in NAMED:
        about, make, batch = NAMED[name]
        return Chain(name, about, make(), batch)
    transform = _own(name)
    about = " ".join(repr(transform).split())
    # The batches are small, because samples may be whole images.
    return Chain(name, about if len(about) <= 200 else f"{about[:199]}…", transform, 8, is_own=True)


def _own(name: str) -> Any:
    module_name, colon, attribute = name.partition(":")
    if not (colon and module_name and attribute):
        known = ", ".join(NAMED)
        raise OptionError(f"--transform must be {known} or module:name for one of your own, got {name!r}")
    if os.getcwd() not in sys.path:  # ``python -m`` does the same
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:  # the user's code may raise anything
        raise OptionError(
            f"--transform {name}: importing {module_name!r} failed: {_words(error)}; modules are looked for "
            "in this folder and where Python finds them"
        ) from error
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise OptionError(f"--transform {name}: {module_name!r} has no {attribute!r}") from None
    if _needs_no_arguments(found):
        try:
            found = found()
        except Exception as error:  # the user's code may raise anything
            raise OptionError(f"--transform {name}: calling it failed: {_words(error)}") from error
    if inspect.isclass(found) or not callable(found):
        kind = "class that needs arguments" if inspect.isclass(found) else type(found).__name__
        raise OptionError(f"--transform {name} is a {kind}; name a transform, or a function that makes one")
    return found


def _needs_no_arguments(found: Any) -> bool:
    # Not for other callables: the call of a torch module accepts any arguments.
    if not (inspect.isroutine(found) or inspect.isclass(found) or isinstance(found, partial)):
        return False
    try:
        inspect.signature(found).bind()
    except (TypeError, ValueError):  # arguments are required, or there is no signature
        return False
    return True


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


Arrays = tuple[npt.NDArray[Any], npt.NDArray[Any]]


class UnlikeError(Exception):
    pass


def array_pairs(expected: Any, got: Any) -> Iterator[Arrays]:
    """Yield pairs of arrays: an array of ``expected``, and the array at the same place in ``got``.

    Raises:
        UnlikeError: the structure, a shape or a dtype differs.
    """
    if type(expected) is not type(got):
        raise UnlikeError(f"a {type(got).__name__} instead of a {type(expected).__name__}")
    if isinstance(expected, Mapping):
        _check_like("keys", list(expected), list(got))
        for key, value in expected.items():
            yield from array_pairs(value, got[key])
    elif isinstance(expected, (list, tuple)):
        _check_like("length", len(expected), len(got))
        for left, right in zip(expected, got, strict=True):
            yield from array_pairs(left, right)
    else:
        yield from _leaves(expected, got)


def _leaves(expected: Any, got: Any) -> Iterator[Arrays]:
    torch, kind = require("torch", extra="torch"), cast(Any, type(expected))
    if isinstance(expected, torch.Tensor):
        _check_like("tensor", *(f"{one.dtype} {tuple(one.shape)}" for one in (expected, got)))
        # NumPy has no bfloat16; float32 represents every value of the small float types.
        small = expected.is_floating_point() and expected.element_size() <= 2
        left, right = (one.detach().cpu().float() if small else one.detach().cpu() for one in (expected, got))
        yield left.numpy(), right.numpy()
    elif isinstance(expected, require("PIL.Image", extra="image").Image):
        _check_like("PIL image", *(f"{one.mode} {one.size}" for one in (expected, got)))
        yield np.asarray(expected), np.asarray(got)
    elif isinstance(expected, (np.ndarray, np.generic, bool, int, float, complex)):
        pair = np.asarray(expected), np.asarray(got)
        _check_like("array", *(f"{one.dtype} {one.shape}" for one in pair))
        if pair[0].dtype.kind not in "biufc":
            raise _cannot_be_compared(expected, f" of {pair[0].dtype}")
        yield pair
    elif expected is not None and kind.__eq__ is object.__eq__:  # ``==`` would compare only identity
        raise _cannot_be_compared(expected)
    elif not bool(expected == got):
        raise UnlikeError(f"{got!r} instead of {expected!r}")


def _check_like(what: str, expected: Any, got: Any) -> None:
    if expected != got:
        raise UnlikeError(f"{what} {got} instead of {expected}")


def _cannot_be_compared(value: Any, more: str = "") -> OptionError:
    return OptionError(
        f"the transform gives a {type(value).__name__}{more}, which cannot be compared; let it give "
        "tensors, arrays, PIL images or numbers, or lists and dicts of them"
    )


# The user's transform is called twice for this many images, to check that it is deterministic.
TRIED_TWICE = 8
# Further failures are only counted, because a failed disk causes a failure for every sample.
MOST_KEPT = 1000


@dataclass(frozen=True)
class Failure:
    index: int
    path: str
    stock: str | None
    fast: str | None


_ONE_MORE = Failure(-1, "", None, None)


@dataclass
class Outcome:
    total: int
    classes: int
    chosen: int
    index_problems: dict[str, str] = field(default_factory=dict)
    check: Check = field(default_factory=Check)
    unreadable: list[Failure] = field(default_factory=list)
    one_sided: list[Failure] = field(default_factory=list)
    plan: str = ""
    cached: int | None = None  # images that the cache contains; None if no cache is compared

    @property
    def equal(self) -> bool:
        return not (self.index_problems or self.check.photos_differing or self.one_sided)

    @property
    def seen(self) -> int:
        return self.check.photos + len(self.unreadable) + len(self.one_sided)


class _Try(NamedTuple):
    sample: Any = None
    error: str | None = None

    @classmethod
    def failed(cls, error: BaseException) -> _Try:
        if isinstance(error, BadSampleError) and error.__cause__ is not None:
            error = error.__cause__
        return cls(error=f"{type(error).__name__}: {error}")


def chosen(total: int, count: int | None, seed: int) -> list[int]:
    if count is None or count >= total:
        return list(range(total))
    starts = [part * total // count for part in range(count + 1)]
    drawn: list[int] = np.random.default_rng(seed).integers(starts[:-1], starts[1:]).tolist()
    return drawn


def compare_folder(
    stock: Any, chain: Chain, count: int | None, seed: int,
    on_image: Callable[[Outcome], None] = lambda outcome: None, cache: Cache | None = None,
) -> Outcome:  # fmt: skip
    fast = fastpipe.FastImageFolder(stock.root, chain.transform, cache=cache or "auto")
    indices = chosen(len(stock), count, seed)
    cached = None
    if cache is not None:
        store = open_cache_store(cache)
        assert store is not None  # a folder that cannot be used is an error
        store.freeze()
        cached = fast._running().count_cached([stock.samples[index][0] for index in indices])
        if not cached:
            raise OptionError(
                f"none of the {len(indices):,} images is in the cache in {cache.dir!r}: it is another "
                "folder's, or the files have changed since. 'fastpipe stage FOLDER DIR --form …' fills it"
            )
    outcome = Outcome(
        len(stock),
        len(stock.classes),
        len(indices),
        index_problems(stock, fast),
        plan=str(fast.plan),
        cached=cached,
    )
    if outcome.index_problems:  # an index may mean different files in the two datasets
        return outcome
    if not fast.plan.draws:
        stock.transform = chain.transform
    for index, made, draws in _made(fast, indices, chain.batch, seed):
        expected = _expected(stock, fast, index, draws)
        if chain.is_own and outcome.seen < TRIED_TWICE:
            _check_repeats(chain, expected, _expected(stock, fast, index, draws))
        _add(outcome, stock.samples[index][0], index, expected, made)
        on_image(outcome)
    if not outcome.check.photos and not outcome.one_sided:
        first = outcome.unreadable[0]
        raise OptionError(
            f"none of the {outcome.chosen:,} images can be read, or the transform fails on all: "
            f"{first.path!r}: {first.stock}"
        )
    return outcome


def _add(outcome: Outcome, path: str, index: int, expected: _Try, made: _Try) -> None:
    if expected.error is not None or made.error is not None:
        failed_alike = expected.error is not None and made.error is not None
        failures = outcome.unreadable if failed_alike else outcome.one_sided
        is_kept = len(failures) < MOST_KEPT
        failures.append(Failure(index, path, expected.error, made.error) if is_kept else _ONE_MORE)
        return
    (value, target), (other, other_target) = expected.sample, made.sample
    try:
        if (type(target), target) != (type(other_target), other_target):
            raise UnlikeError(f"label {other_target!r} instead of {target!r}")
        outcome.check.add(list(array_pairs(value, other)), index, path)
    except UnlikeError as unlike:
        outcome.check.add_unlike(str(unlike), index, path)


def _expected(stock: Any, fast: Any, index: int, draws: Any) -> _Try:
    path = stock.samples[index][0]
    try:
        require_regular(path, os.stat(path))  # torchvision would wait forever for the writer of a fifo
        value, target = stock[index]
        return _Try((fast.plan.reference(value, draws) if fast.plan.draws else value, target))
    except (MemoryError, ImportError):  # a failure of the machine, not of the file
        raise
    except Exception as error:  # Pillow or the user's code may raise anything
        return _Try.failed(error)


def _made(fast: Any, indices: Sequence[int], size: int, seed: int) -> Iterator[tuple[int, _Try, Any]]:
    chunks = [indices[first : first + size] for first in range(0, len(indices), size)]
    # This loader can continue after an error.  It prefetches only one batch, as batches may be large.
    batches = iter(
        fastpipe.FastLoader(fast, batch_sampler=chunks, collate_fn=list, seed=seed, prefetch_batches=1)
    )
    position = 0
    for chunk in chunks:
        places = np.arange(position, position + len(chunk))
        position += len(chunk)
        try:
            samples = next(batches)
        except (MemoryError, ImportError, StopIteration):  # a failure of the machine, or a bug
            raise
        except Exception as error:
            if len(chunk) == 1 and size == 1:
                yield chunk[0], _Try.failed(error), fast.plan.draw(Key(seed, 0, places)).tolist()[0]
                continue
            for index in chunk:  # read each sample separately, to find the failed sample
                yield from _made(fast, [index], 1, seed + 1 + index)
        else:
            drawn = fast.plan.draw(Key(seed, 0, places)).tolist()
            yield from zip(chunk, map(_Try, samples), drawn, strict=True)


def _check_repeats(chain: Chain, first: _Try, second: _Try) -> None:
    if first.error is not None or second.error is not None:
        return
    again = Check()
    try:
        again.add(list(array_pairs(first.sample, second.sample)), 0, "")
    except UnlikeError as unlike:
        again.add_unlike(str(unlike), 0, "")
    if again.photos_differing:
        raise OptionError(
            f"--transform {chain.name} gives another result when it is called again with the same image, so "
            "nothing can be compared; leave its random steps out, or take --transform train"
        )
