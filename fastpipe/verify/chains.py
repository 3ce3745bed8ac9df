"""The transforms under which samples are compared: named ones, and the user's own."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastpipe.bench.images import check_transform, train_transform
from fastpipe.core.extras import require
from fastpipe.errors import OptionError

__all__ = ["NAMED", "Chain", "chain_of"]


@dataclass(frozen=True)
class Chain:
    """A transform to compare with.

    Attributes:
        name: what the user asked for.
        about: its steps, in words.
        transform: as an image folder takes it.
        batch: samples made side by side.  One by one where they may be large.
        is_own: whether it is the user's code, of which nothing is known.
    """

    name: str
    about: str
    transform: Any
    batch: int
    is_own: bool = False


def _whole_image() -> Any:
    # Without any transform fastpipe, too, hands out Pillow's own image: there would be nothing
    # to compare.  As a tensor it comes from the fast decoder.
    return require("torchvision", extra="torch").transforms.PILToTensor()


# Name → steps in words, the transform, samples in a batch.
NAMED: dict[str, tuple[str, Callable[[], Any], int]] = {
    "eval": ("Resize(256), CenterCrop(224), PILToTensor()", check_transform, 32),
    "train": (
        "RandomResizedCrop(224), RandomHorizontalFlip(), PILToTensor(), with the same draws in both",
        partial(train_transform, "uint8"),
        32,
    ),
    "none": ("PILToTensor(): every pixel at full size", _whole_image, 1),
}


def chain_of(name: str) -> Chain:
    """The chain that ``--transform`` names.

    Args:
        name: one of ``NAMED``, or ``"module:name"`` for a transform of the user's, or for a
            function or class that makes one when it is called without arguments.

    Raises:
        OptionError: it is neither; the message says what went wrong.
    """
    if name in NAMED:
        about, make, batch = NAMED[name]
        return Chain(name, about, make(), batch)
    transform = _own(name)
    about = " ".join(repr(transform).split())
    # Fewer at a time: they may give whole images.
    return Chain(name, about if len(about) <= 200 else f"{about[:199]}…", transform, 8, is_own=True)


def _own(name: str) -> Any:
    """The user's transform."""
    module_name, colon, attribute = name.partition(":")
    if not (colon and module_name and attribute):
        known = ", ".join(NAMED)
        raise OptionError(f"--transform must be {known} or module:name for one of your own, got {name!r}")
    found = _imported(name, module_name)
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise OptionError(f"--transform {name}: {module_name!r} has no {attribute!r}") from None
    if _needs_no_arguments(found):
        try:
            found = found()
        except Exception as error:  # whatever the user's code raises
            raise OptionError(f"--transform {name}: calling it failed: {_words(error)}") from error
    if inspect.isclass(found) or not callable(found):
        kind = "class that needs arguments" if inspect.isclass(found) else type(found).__name__
        raise OptionError(f"--transform {name} is a {kind}; name a transform, or a function that makes one")
    return found


def _imported(name: str, module_name: str) -> Any:
    """The user's module, from the present folder if it is there, as ``python -m`` finds it."""
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(module_name)
    except Exception as error:  # whatever the user's code raises
        raise OptionError(
            f"--transform {name}: importing {module_name!r} failed: {_words(error)}; modules are looked for "
            "in this folder and where Python finds them"
        ) from error


def _needs_no_arguments(found: Any) -> bool:
    """Whether it makes a transform, rather than being one."""
    # Not any callable: a torch module's call takes whatever it is given.
    if not (inspect.isroutine(found) or inspect.isclass(found) or isinstance(found, partial)):
        return False
    try:
        inspect.signature(found).bind()
    except (TypeError, ValueError):  # it needs some, or does not say
        return False
    return True


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
