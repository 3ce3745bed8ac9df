"""What was asked of ``generate``, checked."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from fastpipe.core.machine import default_threads
from fastpipe.core.processes import why_no_processes
from fastpipe.errors import OptionError
from fastpipe.generation.crews import Kind
from fastpipe.generation.form import Columns, declared
from fastpipe.generation.making import Policy

__all__ = ["Asked"]


@dataclass(frozen=True)
class Asked:
    """The arguments of ``generate``; see there.

    Raises:
        OptionError: they cannot work.
    """

    function: Callable[..., Any]
    rows: int
    out: Path
    seed: int
    workers: int | Literal["auto"] = "auto"
    executor: Executor | Kind | None = None
    columns: Columns = None
    chunk_rows: int | None = None
    resume: bool | Literal["changed"] = True
    probe: bool = True
    max_bytes: int | None = None
    policy: Policy = "raise"
    seeds_globals: bool = False

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise OptionError(f"fn= is a function fn(index, rng), got {type(self.function).__name__}")
        for name, value, least in (
            ("n", self.rows, 1), ("seed", self.seed, 0), ("chunk_rows", self.chunk_rows, 1),
            ("max_bytes", self.max_bytes, 1),
            ("workers", None if self.workers == "auto" else self.workers, 0),
        ):  # fmt: skip
            if value is not None and (not isinstance(value, int) or value < least):
                raise OptionError(f"{name}= is a whole number from {least}, got {value!r}")
        if self.policy not in get_args(Policy):
            raise OptionError(f"bad_samples= is one of {get_args(Policy)}, got {self.policy!r}")
        is_named = self.executor in (None, *get_args(Kind))
        if not is_named and not callable(getattr(self.executor, "submit", None)):
            raise OptionError(
                "executor= is 'processes', 'threads', or a concurrent.futures.Executor, got "
                f"{self.executor!r}"
            )
        if self.resume not in (True, False, "changed"):
            raise OptionError(f"resume= is True, False or 'changed', got {self.resume!r}")
        if self.seeds_globals and self.executor == "threads" and self.workers not in (0, 1):
            raise OptionError(
                "seed_globals=True with executor='threads': threads share the global generators; give "
                "executor='processes', or workers=1"
            )
        declared(self.columns)
        self._check_out()

    def _check_out(self) -> None:
        if self.out.is_dir():
            raise OptionError(f"{self.out} is a folder; name a file")
        if not self.out.parent.is_dir():
            raise OptionError(f"there is no folder {self.out.parent}; make it first")

    @property
    def most_workers(self) -> int:
        """How many workers there may be."""
        if self.workers != "auto":
            return self.workers
        return 0 if self.executor != "threads" and why_no_processes() else default_threads()

    @property
    def columns_noted(self) -> str:
        """What ``columns=`` says, as text that can be compared."""
        found = declared(self.columns)
        return "; ".join(f"{name}: {one.dtype} {one.shape}" if one else name for name, one in found.items())
