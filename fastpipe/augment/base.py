"""What all augmentations of batches share: parameters are drawn first, and applied then."""

from __future__ import annotations

import inspect
import itertools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fastpipe.augment.parameters import Float64Array, Parameters, uniform_rows
from fastpipe.augment.reference import Changes, chain_reference
from fastpipe.augment.steps import Step
from fastpipe.core.slots import SlotPool
from fastpipe.core.types import Key
from fastpipe.errors import AugmentError

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_Made = TypeVar("_Made")
Ops = Sequence[Any]  # augmentations, of which the methods of ``Augmentation`` are called
Shape = tuple[int, ...]  # of a sample
Table = npt.NDArray[Any]  # numbers or flags, a row for each sample


def uploaded(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Copy an array to a device, without waiting for it."""
    found = torch.from_numpy(np.require(array, requirements="W"))  # torch warns of what is read-only
    return found.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else found.to(device)


def untraced(function: Callable[..., _Made], *args: Any) -> _Made:
    """Call a function that torch.compile does not trace."""
    # As a decorator, ``torch.compiler.disable`` would load the compiler, which takes more than a second.
    if torch.compiler.is_compiling():
        found: _Made = torch.compiler.disable(function)(*args)  # type: ignore[no-untyped-call]
        return found
    return function(*args)


# ---- tables of a chain's numbers -------------------------------------------------------------------
#
# The parameters of a chain are one table, (N, columns), in which those of each operation come one after the
# other; so are the numbers that are applied.


def shape_after(ops: Ops, shape: Shape) -> Shape:
    """Return the shape of a sample after a chain."""
    for op in ops:
        shape = op.shape_after(shape)
    return shape


def dtype_after(ops: Ops, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of samples after a chain."""
    for op in ops:
        dtype = op.dtype_after(dtype)
    return dtype


def columns_of(ops: Ops, channels: int, of_applied: bool = False) -> Iterator[tuple[Any, slice]]:
    """Yield each operation with its columns of parameters, or of what is applied."""
    begin = 0
    for op in ops:
        names = op.applied_names_for(channels) if of_applied else op.names_for(channels)
        yield op, slice(begin, begin + len(names))
        begin += len(names)


def for_masks(ops: Ops, channels: int) -> tuple[tuple[Any, ...], npt.NDArray[np.intp]]:
    """Return what does the same with masks or labels, and which columns of what is applied it needs."""
    twins, columns = [], [np.zeros(0, np.intp)]
    for op, own in columns_of(ops, channels, of_applied=True):
        if (twin := op.for_masks()) is not None:
            twins.append(twin)
            columns.append(np.arange(own.start, own.stop))
    return tuple(twins), np.concatenate(columns)


class Layout:
    """The columns of a chain's tables: of uniform numbers, of parameters, and of what is applied."""

    def __init__(self, ops: Ops, channels: int) -> None:
        self.draws = self.names = self.applied = 0
        self._parts: list[Any] = []  # an operation, and its columns of the three
        self._gates: list[tuple[int, int, int, float]] = []  # whether operations are applied: columns, and p
        self._add(ops, channels)

    def _add(self, ops: Ops, channels: int) -> None:
        for op in ops:
            if op._within is not None:  # a number of its own, and then those of its operations
                self._gates.append((self.draws, self.names, self.applied, op.p))
                self.draws, self.names, self.applied = self.draws + 1, self.names + 1, self.applied + 1
                self._add(op._within, channels)
                continue
            begins = self.draws, self.names, self.applied
            self.draws += op.draws_for(channels)
            self.names += len(op.names_for(channels))
            self.applied += len(op.applied_names_for(channels))
            self._parts.append((op, *map(slice, begins, (self.draws, self.names, self.applied))))

    def drawn(self, u: Float64Array, shape: Shape) -> Float64Array:
        """Return parameters (N, names) for uniform numbers, of samples of this shape."""
        found = np.empty((len(u), self.names))
        for draw, name, _, p in self._gates:
            found[:, name] = u[:, draw] < p
        for op, draws, names, _ in self._parts:
            found[:, names] = op.table(u[:, draws], shape)
            shape = op.shape_after(shape)
        return found

    def computed(self, table: Float64Array, shape: Shape) -> Float64Array:
        """Compute what is applied for parameters of samples of this shape: (N, applied)."""
        found = np.empty((len(table), self.applied))
        for _, name, gate, _ in self._gates:
            found[:, gate] = table[:, name]
        for op, _, names, applied in self._parts:
            found[:, applied] = op.applied(table[:, names], shape)
            shape = op.shape_after(shape)
        return found


def applied_table(ops: Ops, table: Float64Array, shape: Shape) -> Float64Array:
    """Compute what is applied for the parameters of a chain."""
    return Layout(ops, shape[0]).computed(table, shape)


# ---- augmentations and chains of them --------------------------------------------------------------

_changes = 0  # how often an attribute of an augmentation was set anew
_MOST_KEPT = 256  # forms of batches
_SLOTS = 3  # batches whose memory is kept, for the next ones; what mixes needs two
_Own = TypeVar("_Own", bound="Augmentation")


class OfBatches:
    """What is called with batches."""

    _chain: Chain

    def __call__(
        self, images: Tensor, *others: Any, generator: torch.Generator | None = None, key: Key | None = None
    ) -> Any:
        """Draw parameters, and apply them.

        Args:
            images: (N, C, H, W), uint8, float16, bfloat16 or float32, of any device; spectrograms are
                floats, also (N, F, T).  Volumes are (N, C, D, H, W) or (N, D, H, W), floats, or integers that
                become float32 where values change; motion is (N, T, J, C), floats.
            others: what belongs to the images.  Geometry takes along masks, boxes and keypoints, as
                ``torchvision.tv_tensors``; of volumes all tensors of as many voxels, (N, D, H, W) or
                (N, K, D, H, W), which are labels: of the nearest voxel, whatever their dtype.  Anything else,
                such as numbers of classes, is handed through.
            generator: of the CPU; gives one number to a batch.  Default: torch's global generator.
            key: where the samples stand in an epoch, in the place of a generator.

        Returns:
            The new images; where there are ``others``, a tuple of them and the others.

        Raises:
            AugmentError: images of another kind, or an empty batch.
        """
        return self._chain(images, others, generator, key)

    def apply(
        self, images: Tensor, parameters: Parameters | Sequence[Parameters], lengths: Tensor | None = None
    ) -> Any:
        """Return images changed by parameters that were drawn before; errors as of a call.

        With the ``lengths`` of motion a tuple of it and its new lengths.
        """
        given = [parameters] if isinstance(parameters, Parameters) else parameters
        return self._chain.apply(images, given, lengths)

    def reference(
        self, images: Tensor, parameters: Parameters | Sequence[Parameters], lengths: Tensor | None = None
    ) -> Any:
        """Return what torchvision's functions make of the images, one by one, with the same parameters.

        Of volumes and motion, what NumPy and SciPy make of them.  It is slow, and there to compare with; it
        has the shape and the dtype of what ``apply`` gives.
        """
        given = [parameters] if isinstance(parameters, Parameters) else parameters
        return self._chain.reference(images, given, lengths)

    def margin(self, size: Sequence[int]) -> tuple[int, ...]:
        """Return how many voxels more volumes should have, on each side, for a result of a size (D, H, W), so
        that little of it is from beyond: ``margin=`` of a ``FastPatchDataset``.

        It is enough for rotation about one axis by any of the angles, for shifts, and, as in nnU-Net, for
        what is scaled by up to 1 / 0.85; several at once may need more.

        Raises:
            AugmentError: an augmentation moves voxels and does not say what ``size=`` it cuts.
        """
        return self._chain.margin(size)


class Augmentation(OfBatches):
    """An augmentation of a batch, in which each sample has parameters of its own: what all kinds have.

    Images are changed by a ``BatchTransform``; volumes and motion have classes of their own.

    Attributes:
        draws: uniform numbers that a sample needs; default: as many as ``names`` are.
        names: of its parameters.
        applied_names: of what is applied, where that is computed from the parameters first.
        kind: what it is for: ``"images"``, which spectrograms are as well, ``"volumes"`` or ``"motion"``.
        ranks: 4 for images (N, C, H, W), and 3 as well for spectrograms (N, F, T); 5 and 4 for volumes.
        mixes: whether samples depend on each other.
    """

    draws: int = 0
    names: tuple[str, ...] = ()
    applied_names: tuple[str, ...] | None = None
    kind: str
    ranks: tuple[int, ...] = (4,)
    mixes: bool = False
    chain_type: type[Chain]  # what calls it, alone or in a Compose

    _has_draws: ClassVar[bool] = False  # by a number of its own, not by its names
    _within: Sequence[Any] | None = None  # operations that it applies to some samples, by a number of its own
    native_step: str | None = None  # the native core's name for it, where that takes no more than columns

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        own = cls.__dict__
        if "draws" in own:
            cls._has_draws = True  # which those that inherit from it have, too
        elif isinstance(own.get("names"), Sequence) and not cls._has_draws:
            cls.draws = len(cls.names)

    def __new__(cls: type[_Own], *args: Any, **options: Any) -> _Own:
        # Here, where the compiler does not look.
        made = super().__new__(cls)
        made._chain = cls.chain_type([made], cls.__name__)
        return made

    def draw(
        self, shape: Sequence[int], *, generator: torch.Generator | None = None, key: Key | None = None
    ) -> Parameters:
        """Return parameters for a batch of this shape; further arguments as of a call."""
        return self._chain.draw(shape, generator, key)[0]

    def __setattr__(self, name: str, value: Any) -> None:
        global _changes
        if name in self.__dict__:
            _changes += 1  # chains forget what they computed from their operations
        super().__setattr__(name, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return super().__reduce_ex__(max(protocol, 2))  # the older ones do not call `__new__`

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_chain"}

    # ``RandomApply``, and what changes channels each in its own way, have more for more channels.

    def draws_for(self, channels: int) -> int:
        """Return how many uniform numbers a sample needs."""
        return self.draws

    def names_for(self, channels: int) -> tuple[str, ...]:
        """Return the names of a sample's parameters."""
        return self.names

    def applied_names_for(self, channels: int = 1) -> tuple[str, ...]:
        """Return the names of what is applied: ``applied_names``, or the parameters' own."""
        return self.names_for(channels) if self.applied_names is None else self.applied_names

    def table(self, u: Float64Array, shape: Shape) -> Table:
        """Return parameters for uniform numbers.  Default: these numbers.

        Args:
            u: (N, draws), in [0, 1).
            shape: of a sample, (C, H, W).

        Returns:
            (N, len(names)), numbers or flags.
        """
        return u

    def applied(self, table: Float64Array, shape: Shape) -> Float64Array:
        """Return what is applied for parameters of samples of this shape: (N, len(applied_names))."""
        return table

    def steps(self, column: int, shape: Shape) -> Sequence[Step] | None:
        """Return the native core's steps for a sample of this shape; None, if there are none.

        Args:
            column: where its numbers begin in what is applied for a chain.
            shape: of a sample, (C, H, W).
        """
        return None if self.native_step is None else [Step(self.native_step, column)]

    def shape_after(self, shape: Shape) -> Shape:
        """Return the shape of a sample afterwards."""
        return shape

    def size_before(self, size: tuple[int, ...]) -> tuple[int, ...]:
        """Return the size of volumes, (D, H, W), for a result of this size in which nothing is missing."""
        return size

    def dtype_after(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of images afterwards.

        Raises:
            AugmentError: images of this dtype cannot be changed so.
        """
        return dtype

    def for_masks(self) -> Augmentation | None:
        """Return what does the same with masks; None if masks stay as they are."""
        return None

    def check(self, shape: Sequence[int]) -> None:
        """Raise an ``AugmentError`` for a batch of this shape that it cannot take."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.extra_repr()})"

    def extra_repr(self) -> str:
        """Return the arguments, for ``repr``: those that are attributes of the same name."""
        kinds = [kind for kind in type(self).__mro__ if "__init__" in kind.__dict__]
        signatures = [inspect.signature(kind.__dict__["__init__"]) for kind in kinds]
        names = {name: None for one in signatures for name in one.parameters}
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names if name in vars(self))


class Chain(ABC):
    """Augmentations one after the other, as a call runs them.  Each kind has a class of its own.

    Args:
        ops: the augmentations.
        name: who is called, for messages.
        steps: what is done in their place, with the same parameters in the same order; default: they are.
        lengths_at: which part of a batch of motion has its lengths; None for none.

    Attributes:
        one: what a sample is called, in messages.
        shapes: of batches, the whole one last.
        changes: the reference; default: torchvision's functions.
    """

    one: ClassVar[str]
    shapes: ClassVar[tuple[str, ...]]
    dtypes: ClassVar[tuple[torch.dtype, ...]]
    changes: ClassVar[Changes | None] = None

    def __init__(
        self,
        ops: Sequence[Augmentation],
        name: str,
        steps: Sequence[Augmentation] | None = None,
        lengths_at: int | None = None,
    ) -> None:
        self.ops, self.name, self.lengths_at = tuple(ops), name, lengths_at
        self.steps: tuple[Any, ...] = self.ops if steps is None else tuple(steps)
        self.memory, self.memory_of_others = SlotPool(_SLOTS), SlotPool(_SLOTS)
        self._kept: dict[Any, Any] = {}
        self._changes = _changes
        self.number = next(_numbers)
        _chains[self.number] = self

    def __reduce__(self) -> tuple[type[Chain], tuple[Any, ...]]:
        return type(self), (self.ops, self.name, self.steps, self.lengths_at)  # with a number of its own

    def __call__(
        self, samples: Any, others: Sequence[Any], generator: torch.Generator | None, key: Key | None
    ) -> Any:
        """Draw parameters and apply them: see ``Augmentation.__call__``."""
        batch = self.checked(samples)
        if torch.compiler.is_compiling() and generator is None and key is None:
            table: Tensor = torch.ops.fastpipe.drawn(self.number, batch.shape)
        else:
            table = untraced(lambda: torch.from_numpy(self.table(batch.shape, generator, key)))
        return self.given(samples, batch, table, others)

    def given(self, samples: Tensor, batch: Tensor, table: Tensor, others: Sequence[Any]) -> Any:
        """Apply parameters to a batch and to what belongs to it."""
        changed = shaped_as(samples, self.changed(batch, table))
        return (changed, *self.followed(table, batch.shape, others)) if others else changed

    def changed(self, samples: Tensor, table: Tensor) -> Tensor:
        """Change a batch by parameters (N, columns); torch.compile does not trace kernels."""
        if torch.compiler.is_compiling():
            found: Tensor = torch.ops.fastpipe.augmented(samples, table, self.number)
            return found
        return self.by_kernels(samples, table)

    @abstractmethod
    def by_kernels(self, samples: Tensor, table: Tensor) -> Tensor:
        """Change a batch by parameters (N, columns), on any device."""

    def followed(self, table: Tensor, shape: Sequence[int], others: Sequence[Any]) -> Sequence[Any]:
        """Change what belongs to samples (N, …) as they are changed."""
        return others

    # ---- parameters ----------------------------------------------------------------------------

    def table(self, shape: Sequence[int], generator: torch.Generator | None, key: Key | None) -> Float64Array:
        """Return parameters for a batch of this shape, (N, columns)."""
        layout = self.layout(self.ops, shape[1])
        return layout.drawn(uniform_rows(shape[0], layout.draws, generator, key), tuple(shape[1:]))

    def applied(self, table: Tensor, shape: Sequence[int]) -> Float64Array:
        """Compute what is applied for parameters of samples (N, …)."""
        return self.layout(self.steps, shape[1]).computed(table.numpy(), tuple(shape[1:]))

    def layout(self, ops: Sequence[Augmentation], channels: int) -> Layout:
        """Return the layout of the operations, or of the steps that replace them."""
        channels = int(channels)  # may be symbolic in a trace
        return self.kept((ops is self.steps, channels), lambda: Layout(ops, channels))

    def kept(self, key: Any, make: Callable[[], _Made]) -> _Made:
        """Return what ``make`` returned for this key; make it anew once an operation has changed."""
        if self._changes != _changes or len(self._kept) > _MOST_KEPT:
            self._kept, self._changes = {}, _changes
        if key not in self._kept:
            self._kept[key] = make()
        made: _Made = self._kept[key]
        return made

    def form_after(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[tuple[int, ...], torch.dtype]:
        """Return shape and dtype of a batch, (N, C, H, W), afterwards."""
        return (shape[0], *shape_after(self.steps, tuple(shape[1:]))), dtype_after(self.steps, dtype)

    def margin(self, size: Sequence[int]) -> tuple[int, ...]:
        """See ``Augmentation.margin``."""
        before = tuple(size)
        for op in reversed(self.ops):
            before = op.size_before(before)
        return tuple(-(-(more - one) // 2) for more, one in zip(before, size, strict=True))

    def draw(
        self, shape: Sequence[int], generator: torch.Generator | None, key: Key | None
    ) -> list[Parameters]:
        """Return parameters of each operation."""
        whole = self._check_shape(shape)
        table = self.table(whole, generator, key)
        own = columns_of(self.ops, whole[1])
        return [Parameters.of_table(op.names_for(whole[1]), table[:, columns]) for op, columns in own]

    def apply(self, samples: Any, parameters: Sequence[Parameters], lengths: Any = None) -> Any:
        """Change samples by parameters of each operation; return motion with new lengths if it had any."""
        batch, table = self.checked_with(samples, parameters)
        return shaped_as(samples, self.changed(batch, table))

    def reference(self, samples: Any, parameters: Sequence[Parameters], lengths: Any = None) -> Any:
        """Change samples as ``apply``, by the reference."""
        batch, _ = self.checked_with(samples, parameters)
        found = chain_reference(self.ops, batch.cpu(), parameters, self.changes)
        return shaped_as(samples, found.to(batch.device))

    # ---- checks --------------------------------------------------------------------------------

    def checked_with(self, samples: Any, parameters: Sequence[Parameters]) -> tuple[Tensor, Tensor]:
        """Return a batch of what was given, and its parameters, (N, columns); or raise an error."""
        batch = self.checked(samples)
        if len(parameters) != len(self.ops):
            raise AugmentError(
                f"{self.name} has {len(self.ops)} operations, got {len(parameters)} parameters"
            )
        for op, one in zip(self.ops, parameters, strict=True):
            names = op.names_for(batch.shape[1])
            if len(one.table) != len(batch) or tuple(one) != names:
                raise AugmentError(
                    f"{type(op).__name__} takes parameters {names} of {len(batch)} samples, got {one}"
                )
        tables = [np.zeros((len(batch), 0)), *(one.table for one in parameters)]
        return batch, torch.from_numpy(np.concatenate(tables, axis=1))

    def checked(self, samples: Any) -> Tensor:
        """Return what was given as a batch in its whole shape, (N, C, H, W), or raise an error."""
        if not isinstance(samples, Tensor):
            raise AugmentError(f"{self.name} takes a tensor {self.shapes[-1]}, got {type(samples).__name__}")
        if torch.compiler.is_compiling():
            whole = self._check_form(samples.shape, samples.dtype)
        else:
            form = (tuple(samples.shape), samples.dtype)
            whole = self.kept(form, lambda: self._check_form(*form))
        return samples.unsqueeze(1) if samples.ndim < len(whole) else samples

    def _check_form(self, shape: Sequence[int], dtype: torch.dtype) -> Shape:
        """Return the whole shape of a batch of this one, or raise an error."""
        whole = self._check_shape(shape)
        if dtype not in self.dtypes:
            told = [str(dtype).removeprefix("torch.") for dtype in self.dtypes]
            raise AugmentError(f"{self.name} takes {', '.join(told[:-1])} or {told[-1]}, got {dtype}")
        dtype_after(self.ops, dtype)
        return whole

    def wanted(self) -> Sequence[str]:
        """Return the shapes of batches that it takes, the whole one last."""
        return self.shapes

    def _check_shape(self, shape: Sequence[int]) -> Shape:
        wanted = self.wanted()
        full = wanted[-1].count(",") + 1
        if len(shape) not in range(full - len(wanted) + 1, full + 1):
            one = f": give one {self.one} as {self.one}[None]"
            hint = one if len(shape) == full - len(wanted) else ""
            raise AugmentError(
                f"{self.name} takes a batch {' or '.join(wanted)}, got shape {tuple(shape)}{hint}"
            )
        if 0 in shape:
            raise AugmentError(f"{self.name} got an empty batch, of shape {tuple(shape)}")
        whole = (shape[0], 1, *shape[1:]) if len(shape) < full else tuple(shape)
        at = whole
        for op in self.ops:
            op.check(at)
            at = (at[0], *op.shape_after(at[1:]))
        return whole

    def check_gradient(self, samples: Tensor) -> None:
        """Raise an error where a gradient is wanted of what is not differentiated."""
        if samples.requires_grad and torch.is_grad_enabled():
            what = self.ops[0].kind
            raise AugmentError(
                f"{self.name} does not differentiate what it does to {what}: give {what}.detach()"
            )


def shaped_as(samples: Tensor, changed: Tensor) -> Tensor:
    """Return a batch without the axis of channels where that was not given."""
    return changed.squeeze(1) if samples.ndim < changed.ndim else changed


# ---- for torch.compile ---------------------------------------------------------------------------
#
# Drawing and the processor's kernels are opaque to the compiler: operations of torch's, which know a chain
# by its number.

_chains: weakref.WeakValueDictionary[int, Chain] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


def _drawn(number: int, shape: list[int]) -> Tensor:
    return torch.from_numpy(_chains[number].table(shape, None, None))


def _like_drawn(number: int, shape: list[int]) -> Tensor:
    chain = _chains[number]
    return torch.empty((shape[0], chain.layout(chain.ops, shape[1]).names), dtype=torch.float64)


def _applied(table: Tensor, number: int, shape: list[int], is_pinned: bool) -> Tensor:
    found = _chains[number].applied(table, (len(table), *shape)).astype(np.float32)
    # Nobody waits for pinned memory's way to the device.
    return torch.from_numpy(found).pin_memory() if is_pinned else torch.from_numpy(found)


def _like_applied(table: Tensor, number: int, shape: list[int], is_pinned: bool) -> Tensor:
    chain = _chains[number]
    return table.new_empty((len(table), chain.layout(chain.steps, shape[0]).applied), dtype=torch.float32)


def _augmented(samples: Tensor, table: Tensor, number: int) -> Tensor:
    return _chains[number].by_kernels(samples, table)


def _like_augmented(samples: Tensor, table: Tensor, number: int) -> Tensor:
    shape, dtype = _chains[number].form_after(samples.shape, samples.dtype)
    return samples.new_empty(shape, dtype=dtype)


_ANY = "CompositeExplicitAutograd"
_SEEDED = torch.Tag.nondeterministic_seeded  # two draws are not one
for _signature, _backend, _function, _traced, _tags in (
    ("drawn(int number, SymInt[] shape)", _ANY, _drawn, _like_drawn, _SEEDED),
    (
        "applied(Tensor table, int number, SymInt[] shape, bool is_pinned)",
        "CPU",
        _applied,
        _like_applied,
        (),
    ),
    ("augmented(Tensor samples, Tensor table, int number)", _ANY, _augmented, _like_augmented, ()),
):
    _name = f"fastpipe::{_signature.partition('(')[0]}"
    torch.library.define(_name, f"({_signature.partition('(')[2]} -> Tensor", tags=_tags)
    torch.library.impl(_name, _backend, _function)
    torch.library.register_fake(_name, _traced)
