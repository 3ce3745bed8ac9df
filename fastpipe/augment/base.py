"""The base class of all augmentations of batches. Parameters are drawn first, then applied to a batch."""

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
Ops = Sequence[Any]  # augmentations; only the methods of ``Augmentation`` are called
Shape = tuple[int, ...]  # the shape of a sample
Table = npt.NDArray[Any]  # numbers or flags, one row per sample


def uploaded(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Copy an array to a device without waiting for the copy."""
    found = torch.from_numpy(np.require(array, requirements="W"))  # torch warns about read-only arrays
    return found.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else found.to(device)


def untraced(function: Callable[..., _Made], *args: Any) -> _Made:
    """Call a function without letting torch.compile trace it."""
    # ``torch.compiler.disable`` as a decorator would load the compiler, which takes more than a second.
    if torch.compiler.is_compiling():
        found: _Made = torch.compiler.disable(function)(*args)  # type: ignore[no-untyped-call]
        return found
    return function(*args)


# ---- tables of a chain's numbers -------------------------------------------------------------------
#
# The parameters of a chain form one table, (N, columns). The columns of the operations follow each other.
# The applied numbers are the numbers that change the samples. They are computed from the parameters, for
# example a matrix from an angle, and form another table (N, columns).


def shape_after(ops: Ops, shape: Shape) -> Shape:
    """Return the shape of a sample after the augmentations ``ops``."""
    for op in ops:
        shape = op.shape_after(shape)
    return shape


def dtype_after(ops: Ops, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of samples after the augmentations ``ops``."""
    for op in ops:
        dtype = op.dtype_after(dtype)
    return dtype


def columns_of(ops: Ops, channels: int, of_applied: bool = False) -> Iterator[tuple[Any, slice]]:
    """Yield each augmentation with its columns in the table of parameters, or, if ``of_applied``, in the
    table of the numbers that are computed from the parameters and applied to samples."""
    begin = 0
    for op in ops:
        names = op.applied_names_for(channels) if of_applied else op.names_for(channels)
        yield op, slice(begin, begin + len(names))
        begin += len(names)


def for_masks(ops: Ops, channels: int) -> tuple[tuple[Any, ...], npt.NDArray[np.intp]]:
    """Return the augmentations that move masks or labels as images move, and their columns in the table of
    applied numbers (see ``Layout``)."""
    twins, columns = [], [np.zeros(0, np.intp)]
    for op, own in columns_of(ops, channels, of_applied=True):
        if (twin := op.for_masks()) is not None:
            twins.append(twin)
            columns.append(np.arange(own.start, own.stop))
    return tuple(twins), np.concatenate(columns)


class Layout:
    """The columns of the three tables of a chain of augmentations: the uniform random numbers, the parameters
    made from them, and the numbers that are applied to the samples, computed from the parameters."""

    def __init__(self, ops: Ops, channels: int) -> None:
        self.draws = self.names = self.applied = 0
        self._parts: list[Any] = []  # an operation, and its columns in the three tables
        self._gates: list[tuple[int, int, int, float]] = []  # each RandomApply's flag columns, and p
        self._add(ops, channels)

    def _add(self, ops: Ops, channels: int) -> None:
        for op in ops:
            if op._within is not None:  # a RandomApply: its own number, then the numbers of its operations
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
        """Return the parameters, (N, names), from the uniform random numbers ``u``, for samples of this
        shape."""
        found = np.empty((len(u), self.names))
        for draw, name, _, p in self._gates:
            found[:, name] = u[:, draw] < p
        for op, draws, names, _ in self._parts:
            found[:, names] = op.table(u[:, draws], shape)
            shape = op.shape_after(shape)
        return found

    def computed(self, table: Float64Array, shape: Shape) -> Float64Array:
        """Compute the numbers to apply, (N, applied), from the parameters of samples of this shape."""
        found = np.empty((len(table), self.applied))
        for _, name, gate, _ in self._gates:
            found[:, gate] = table[:, name]
        for op, _, names, applied in self._parts:
            found[:, applied] = op.applied(table[:, names], shape)
            shape = op.shape_after(shape)
        return found


def applied_table(ops: Ops, table: Float64Array, shape: Shape) -> Float64Array:
    """Compute the numbers to apply to samples of this shape from the parameters of the augmentations."""
    return Layout(ops, shape[0]).computed(table, shape)


# ---- augmentations and chains of them --------------------------------------------------------------

_changes = 0  # how often any attribute of an augmentation was changed
_MOST_KEPT = 256  # the most cached results per chain, for example one per shape of batches
_SLOTS = 3  # the number of batches whose memory is kept for reuse; mixing needs two
_Own = TypeVar("_Own", bound="Augmentation")


class OfBatches:
    """The base class of augmentations and of ``Compose``, with the methods that take a batch."""

    _chain: Chain

    def __call__(
        self, images: Tensor, *others: Any, generator: torch.Generator | None = None, key: Key | None = None
    ) -> Any:
        """Draw parameters and apply them to a batch.

        Args:
            images: (N, C, H, W), uint8, float16, bfloat16 or float32, on any device.  Spectrograms are
                floats, and may also be (N, F, T).  Volumes are (N, C, D, H, W) or (N, D, H, W), either
                floats, or integers that become float32 if the values change.  Motion is (N, T, J, C), floats.
            others: annotations of the images.  Geometric augmentations also move masks, boxes and keypoints
                that are ``torchvision.tv_tensors``.  For volumes, every tensor with the same voxels, (N, D,
                H, W) or (N, K, D, H, W), is a label map of any dtype, and is resampled by the nearest voxel.
                All other annotations, such as class numbers, are returned unchanged.
            generator: a CPU generator, from which one number per batch is drawn.  Default: torch's global
                generator.
            key: the seed, the epoch and the samples' positions in the epoch. It replaces the generator.

        Returns:
            The new images. If ``others`` are given, a tuple of the new images and the new annotations.

        Raises:
            AugmentError: the augmentations do not accept images of this kind, or the batch is empty.
            OptionError: ``generator`` is on a device, ``key`` does not fit the batch, or both are given.
        """
        return self._chain(images, others, generator, key)

    def apply(
        self, images: Tensor, parameters: Parameters | Sequence[Parameters], lengths: Tensor | None = None
    ) -> Any:
        """Apply parameters that ``draw`` has returned. Raise the same errors as a call.

        Return the new images.  If the ``lengths`` of motion are given, return a tuple of the new motion and
        its new lengths.
        """
        given = [parameters] if isinstance(parameters, Parameters) else parameters
        return self._chain.apply(images, given, lengths)

    def reference(
        self, images: Tensor, parameters: Parameters | Sequence[Parameters], lengths: Tensor | None = None
    ) -> Any:
        """Compute the result with torchvision's functions, one image at a time, for the same parameters.

        Volumes and motion are computed with NumPy and SciPy.  This method is slow and is used for comparison.
        The result has the same shape and dtype as the result of ``apply``.
        """
        given = [parameters] if isinstance(parameters, Parameters) else parameters
        return self._chain.reference(images, given, lengths)

    def margin(self, size: Sequence[int]) -> tuple[int, ...]:
        """Return a value for ``FastPatchDataset(margin=…)``: extra voxels on each side, (D, H, W).

        With this margin, little of a result of this ``size`` comes from outside the volume.  The margin
        suffices for rotation about one axis by any of the angles, for shifts, and for scaling by up to 1 /
        0.85 as in nnU-Net.  Several of these changes at once may need more.

        Raises:
            AugmentError: an augmentation moves voxels and has no ``size=``.
        """
        return self._chain.margin(size)


class Augmentation(OfBatches):
    """The base class of augmentations of a batch, in which each sample has its own parameters.

    ``BatchTransform`` is the base class for images.  Volumes and motion have their own base classes.

    Attributes:
        draws: the number of uniform random numbers that a sample needs.  Default: one for each of ``names``.
        names: the names of a sample's parameters.
        applied_names: the names of the applied numbers, if these differ from the parameters. The applied
            numbers are computed from the parameters, for example a matrix from an angle, and are used to
            change the samples. None means the parameters themselves.
        kind: ``"images"`` (also for spectrograms), ``"volumes"`` or ``"motion"``.
        ranks: the accepted numbers of dimensions: 4 for images (N, C, H, W), also 3 for spectrograms (N, F,
            T), and 5 and 4 for volumes.
        mixes: whether a changed sample depends on other samples of the batch.
    """

    draws: int = 0
    names: tuple[str, ...] = ()
    applied_names: tuple[str, ...] | None = None
    kind: str
    ranks: tuple[int, ...] = (4,)
    mixes: bool = False
    chain_type: type[Chain]  # the class that runs the augmentation, alone or in a Compose

    _has_draws: ClassVar[bool] = False  # whether a class sets ``draws`` itself
    _within: Sequence[Any] | None = None  # operations that are applied to some samples
    native_step: str | None = None  # the step's name in the native core, if the step takes only columns

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        own = cls.__dict__
        if "draws" in own:
            cls._has_draws = True  # subclasses inherit ``draws``
        elif isinstance(own.get("names"), Sequence) and not cls._has_draws:
            cls.draws = len(cls.names)

    def __new__(cls: type[_Own], *args: Any, **options: Any) -> _Own:
        # The chain is made in ``__new__`` because the compiler does not trace ``__new__``.
        made = super().__new__(cls)
        made._chain = cls.chain_type([made], cls.__name__)
        return made

    def draw(
        self, shape: Sequence[int], *, generator: torch.Generator | None = None, key: Key | None = None
    ) -> Parameters:
        """Draw parameters for a batch of this shape; the other arguments are those of a call."""
        return self._chain.draw(shape, generator, key)[0]

    def __setattr__(self, name: str, value: Any) -> None:
        global _changes
        if name in self.__dict__:
            _changes += 1  # chains then forget the results computed from their operations
        super().__setattr__(name, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return super().__reduce_ex__(max(protocol, 2))  # older protocols do not call ``__new__``

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_chain"}

    # ``RandomApply`` and augmentations that change each channel separately need more numbers for more
    # channels.

    def draws_for(self, channels: int) -> int:
        """Return the number of uniform random numbers that a sample needs."""
        return self.draws

    def names_for(self, channels: int) -> tuple[str, ...]:
        """Return the names of a sample's parameters."""
        return self.names

    def applied_names_for(self, channels: int = 1) -> tuple[str, ...]:
        """Return the names of the numbers to apply: ``applied_names``. If that is None, return ``names``."""
        return self.names_for(channels) if self.applied_names is None else self.applied_names

    def table(self, u: Float64Array, shape: Shape) -> Table:
        """Convert uniform random numbers to parameters.  Default: return the numbers unchanged.

        Args:
            u: (N, draws), float64, in [0, 1).
            shape: the shape of a sample, (C, H, W).

        Returns:
            (N, len(names)), numbers or flags.
        """
        return u

    def applied(self, table: Float64Array, shape: Shape) -> Float64Array:
        """Compute the numbers to apply, (N, len(applied_names)), from parameters of samples of this shape."""
        return table

    def steps(self, column: int, shape: Shape) -> Sequence[Step] | None:
        """Return the steps that the native core takes for this augmentation; None if it has no such steps.

        Args:
            column: the augmentation's first column in the table of the numbers to apply (see ``applied``).
            shape: the shape of a sample, (C, H, W).
        """
        return None if self.native_step is None else [Step(self.native_step, column)]

    def shape_after(self, shape: Shape) -> Shape:
        """Return the shape of a sample after the augmentation."""
        return shape

    def size_before(self, size: tuple[int, ...]) -> tuple[int, ...]:
        """Return how large volumes, (D, H, W), must be to completely fill a result of this size."""
        return size

    def dtype_after(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of images after the augmentation, from their dtype before it.

        Raises:
            AugmentError: the augmentation does not accept images of this dtype.
        """
        return dtype

    def for_masks(self) -> Augmentation | None:
        """Return the augmentation that moves masks as images move, or None if masks stay unchanged."""
        return None

    def check(self, shape: Sequence[int]) -> None:
        """Raise an ``AugmentError`` if the augmentation does not accept a batch of this shape."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.extra_repr()})"

    def extra_repr(self) -> str:
        """Return the arguments for ``repr``: the arguments that are also attributes."""
        kinds = [kind for kind in type(self).__mro__ if "__init__" in kind.__dict__]
        signatures = [inspect.signature(kind.__dict__["__init__"]) for kind in kinds]
        names = {name: None for one in signatures for name in one.parameters}
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names if name in vars(self))


class Chain(ABC):
    """A sequence of augmentations that a call runs in order.  Each kind of augmentation has its own subclass.

    Args:
        ops: the augmentations.
        name: the caller's name, for messages.
        steps: operations that run instead of ``ops``, with the same parameters in the same order.  Default:
            ``ops``.
        lengths_at: the index of the part of a motion batch that holds the sequences' lengths, or None.

    Attributes:
        one: the word for a sample in error messages, such as "image".
        shapes: the accepted shapes of batches; the full shape is last.
        changes: the reference implementation.  Default: torchvision's functions.
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
        return type(self), (self.ops, self.name, self.steps, self.lengths_at)  # the copy gets a new number

    def __call__(
        self, samples: Any, others: Sequence[Any], generator: torch.Generator | None, key: Key | None
    ) -> Any:
        """Draw parameters and apply them; see ``OfBatches.__call__``."""
        batch = self.checked(samples)
        if torch.compiler.is_compiling() and generator is None and key is None:
            table: Tensor = torch.ops.fastpipe.drawn(self.number, batch.shape)
        else:
            table = untraced(lambda: torch.from_numpy(self.table(batch.shape, generator, key)))
        return self.given(samples, batch, table, others)

    def given(self, samples: Tensor, batch: Tensor, table: Tensor, others: Sequence[Any]) -> Any:
        """Apply parameters to a batch and to its annotations."""
        changed = shaped_as(samples, self.changed(batch, table))
        return (changed, *self.followed(table, batch.shape, others)) if others else changed

    def changed(self, samples: Tensor, table: Tensor) -> Tensor:
        """Change a batch with a table of parameters, (N, columns). torch.compile does not trace the
        kernels."""
        if torch.compiler.is_compiling():
            found: Tensor = torch.ops.fastpipe.augmented(samples, table, self.number)
            return found
        return self.by_kernels(samples, table)

    @abstractmethod
    def by_kernels(self, samples: Tensor, table: Tensor) -> Tensor:
        """Change a batch with a table of parameters, (N, columns), on any device."""

    def followed(self, table: Tensor, shape: Sequence[int], others: Sequence[Any]) -> Sequence[Any]:
        """Change the annotations of samples (N, …) as the samples are changed."""
        return others

    # ---- parameters ----------------------------------------------------------------------------

    def table(self, shape: Sequence[int], generator: torch.Generator | None, key: Key | None) -> Float64Array:
        """Return parameters, (N, columns), for a batch of this shape."""
        layout = self.layout(self.ops, shape[1])
        return layout.drawn(uniform_rows(shape[0], layout.draws, generator, key), tuple(shape[1:]))

    def applied(self, table: Tensor, shape: Sequence[int]) -> Float64Array:
        """Compute the numbers to apply to samples (N, …) from a table of their parameters."""
        return self.layout(self.steps, shape[1]).computed(table.numpy(), tuple(shape[1:]))

    def layout(self, ops: Sequence[Augmentation], channels: int) -> Layout:
        """Return the ``Layout`` (columns of tables) of ``ops``, which is ``self.ops`` or ``self.steps``."""
        channels = int(channels)  # may be a symbolic number in a trace
        return self.kept((ops is self.steps, channels), lambda: Layout(ops, channels))

    def kept(self, key: Any, make: Callable[[], _Made]) -> _Made:
        """Return the cached result of ``make`` for this key. A changed augmentation clears the cache."""
        if self._changes != _changes or len(self._kept) > _MOST_KEPT:
            self._kept, self._changes = {}, _changes
        if key not in self._kept:
            self._kept[key] = make()
        made: _Made = self._kept[key]
        return made

    def form_after(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[tuple[int, ...], torch.dtype]:
        """Return the shape and the dtype of a batch, (N, C, H, W), after the chain."""
        return (shape[0], *shape_after(self.steps, tuple(shape[1:]))), dtype_after(self.steps, dtype)

    def margin(self, size: Sequence[int]) -> tuple[int, ...]:
        """See ``OfBatches.margin``."""
        before = tuple(size)
        for op in reversed(self.ops):
            before = op.size_before(before)
        return tuple(-(-(more - one) // 2) for more, one in zip(before, size, strict=True))

    def draw(
        self, shape: Sequence[int], generator: torch.Generator | None, key: Key | None
    ) -> list[Parameters]:
        """Draw the parameters of each operation."""
        whole = self._check_shape(shape)
        table = self.table(whole, generator, key)
        own = columns_of(self.ops, whole[1])
        return [Parameters.of_table(op.names_for(whole[1]), table[:, columns]) for op, columns in own]

    def apply(self, samples: Any, parameters: Sequence[Parameters], lengths: Any = None) -> Any:
        """Apply each operation's parameters. If motion has lengths, return the motion and its new lengths."""
        batch, table = self.checked_with(samples, parameters)
        return shaped_as(samples, self.changed(batch, table))

    def reference(self, samples: Any, parameters: Sequence[Parameters], lengths: Any = None) -> Any:
        """Change samples as ``apply`` does, with the reference implementation."""
        batch, _ = self.checked_with(samples, parameters)
        found = chain_reference(self.ops, batch.cpu(), parameters, self.changes)
        return shaped_as(samples, found.to(batch.device))

    # ---- checks --------------------------------------------------------------------------------

    def checked_with(self, samples: Any, parameters: Sequence[Parameters]) -> tuple[Tensor, Tensor]:
        """Return the given samples as a batch, and a table of parameters (N, columns), or raise an error."""
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
        """Return the given samples as a batch in its full shape, (N, C, H, W), or raise an error."""
        if not isinstance(samples, Tensor):
            raise AugmentError(f"{self.name} takes a tensor {self.shapes[-1]}, got {type(samples).__name__}")
        if torch.compiler.is_compiling():
            whole = self._check_form(samples.shape, samples.dtype)
        else:
            form = (tuple(samples.shape), samples.dtype)
            whole = self.kept(form, lambda: self._check_form(*form))
        return samples.unsqueeze(1) if samples.ndim < len(whole) else samples

    def _check_form(self, shape: Sequence[int], dtype: torch.dtype) -> Shape:
        """Return the full shape of a batch of this shape, or raise an error."""
        whole = self._check_shape(shape)
        if dtype not in self.dtypes:
            told = [str(dtype).removeprefix("torch.") for dtype in self.dtypes]
            raise AugmentError(f"{self.name} takes {', '.join(told[:-1])} or {told[-1]}, got {dtype}")
        dtype_after(self.ops, dtype)
        return whole

    def wanted(self) -> Sequence[str]:
        """Return the accepted shapes of batches; the full shape is last."""
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
        """Raise an error if a gradient is required, because augmentations of this kind are not
        differentiable."""
        if samples.requires_grad and torch.is_grad_enabled():
            what = self.ops[0].kind
            raise AugmentError(
                f"{self.name} is not differentiable with respect to {what}: pass {what}.detach()"
            )


def shaped_as(samples: Tensor, changed: Tensor) -> Tensor:
    """Return a batch without the channel axis if the given samples have no channel axis."""
    return changed.squeeze(1) if samples.ndim < changed.ndim else changed


# ---- for torch.compile ---------------------------------------------------------------------------
#
# The compiler cannot look into the drawing of parameters and the CPU kernels. Drawing and the CPU kernels are
# therefore custom torch operations, which find a chain by the chain's number.

_chains: weakref.WeakValueDictionary[int, Chain] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


def _drawn(number: int, shape: list[int]) -> Tensor:
    return torch.from_numpy(_chains[number].table(shape, None, None))


def _like_drawn(number: int, shape: list[int]) -> Tensor:
    chain = _chains[number]
    return torch.empty((shape[0], chain.layout(chain.ops, shape[1]).names), dtype=torch.float64)


def _applied(table: Tensor, number: int, shape: list[int], is_pinned: bool) -> Tensor:
    found = _chains[number].applied(table, (len(table), *shape)).astype(np.float32)
    # Pinned memory can be copied to a device without waiting.
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
_SEEDED = torch.Tag.nondeterministic_seeded  # the compiler must not merge two draws
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
