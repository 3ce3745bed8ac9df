"""Digests of values: equal ones have the same in every process, whatever else there is in it.

Of ``joblib.hash`` they keep that arrays count by their bytes, and objects by what pickle would take of them.
But a tensor counts by its values and not by its address, two equal parts of a value count the same whether or
not they are one object, the order of a dict counts (a function may go through it), and functions and classes
count by their code.
"""

from __future__ import annotations

import copyreg
import hashlib
import marshal
import os
import struct
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["DigestError", "ValueDigests", "joined"]


class DigestError(TypeError):
    """A value that cannot be told from others: it has no state that pickle would take."""


_NUMBERS = {bool, int, float, complex, type(None)}
_double = struct.Struct(">d").pack
_SCALARS: dict[type, Callable[[Any], bytes]] = {
    type(None): lambda value: b"",
    type(...): lambda value: b"",
    bool: lambda value: b"1" if value else b"0",
    int: lambda value: hex(value).encode(),
    float: _double,
    complex: lambda value: _double(value.real) + _double(value.imag),
    str: lambda value: value.encode("utf-8", "surrogatepass"),
    bytes: bytes,
    bytearray: bytes,
}


def joined(*parts: bytes | memoryview) -> bytes:
    """One digest of many parts, 32 bytes."""
    made = hashlib.blake2b(digest_size=32)
    for part in parts:
        made.update(len(part).to_bytes(8, "little"))
        made.update(part)
    return made.digest()


class ValueDigests:
    """Digests of values, of which parts that are there several times are looked at once.

    Args:
        code: words for a function or a class, which say what it is in every process.

    >>> values = ValueDigests(lambda thing: thing.__qualname__)
    >>> values.hex([1, (2.0, "x")]) == values.hex([1, (2.0, "x")]) != values.hex([1, (2, "x")])
    True
    """

    def __init__(self, code: Callable[[Any], str]) -> None:
        self._code = code
        self._path: dict[int, int] = {}  # of the objects around the present one, their depths
        self._known: dict[int, tuple[object, bytes]] = {}  # with the object, whose id is another's otherwise
        self._highest = 0  # the least depth to which an object in the present one refers

    def hex(self, value: object) -> str:
        """The digest of a value.

        Raises:
            DigestError: there is none.
        """
        self._highest = 0
        try:
            return self._of(value).hex()
        except (DigestError, MemoryError):
            raise
        except RecursionError:
            raise DigestError("it is nested too deep") from None
        except Exception as error:  # of code of the user's or of a package's
            raise DigestError(f"{type(error).__name__}: {error}") from error
        finally:
            self._path.clear()

    def _of(self, value: Any) -> bytes:
        scalar = _SCALARS.get(type(value))
        if scalar is not None:
            return joined(type(value).__name__.encode(), scalar(value))
        if isinstance(value, type | types.FunctionType):
            return joined(b"code", self._code(value).encode())
        key, depth = id(value), len(self._path)
        if key in self._known:
            return self._known[key][1]
        if key in self._path:
            self._highest = min(self._highest, self._path[key])
            return joined(b"around", str(depth - self._path[key]).encode())
        self._path[key] = depth
        outer, self._highest = self._highest, depth
        made = self._of_parts(value)
        del self._path[key]
        if self._highest >= depth:  # else it counts by where it is in what is around it
            self._known[key] = value, made
        self._highest = min(outer, self._highest)
        return made

    def _of_parts(self, value: Any) -> bytes:
        kind = type(value)
        if kind in (list, tuple):
            return self._of_sequence(kind.__name__.encode(), value)
        if kind is dict:
            return joined(b"dict", *(self._of(part) for pair in value.items() for part in pair))
        if kind in (set, frozenset):
            return joined(kind.__name__.encode(), *sorted(map(self._of, value)))
        if kind in (np.ndarray, np.memmap):
            return self._of_array(np.asarray(value))
        if isinstance(value, np.generic):
            return joined(b"scalar", kind.__name__.encode(), self._of_array(np.asarray(value)))
        if isinstance(value, os.PathLike):
            return joined(b"path", self._of(os.fspath(value)))
        if isinstance(value, types.ModuleType):
            return joined(b"module", value.__name__.encode())
        return self._of_frame(value) or self._of_tensor(value) or self._of_object(value)

    def _of_sequence(self, tag: bytes, values: Any) -> bytes:
        if values and set(map(type, values)) <= _NUMBERS:
            # Version 2 writes values only; later ones note which are the same object.
            return joined(tag, marshal.dumps(values, 2))
        return joined(tag, b"", *map(self._of, values))

    def _of_array(self, array: npt.NDArray[Any]) -> bytes:
        dtype = array.dtype
        tag = joined(b"array", repr((dtype.name, dtype.str, array.shape)).encode())
        if dtype.names is not None:  # between the fields may be anything
            fields = (joined(name.encode(), self._of_array(array[name])) for name in dtype.names)
            return joined(tag, *fields)
        if dtype.hasobject or dtype.kind == "T":
            return joined(tag, *map(self._of, array.reshape(-1).tolist()))
        flat = np.ascontiguousarray(array).reshape(-1)
        if not flat.nbytes:
            return tag
        as_bytes = flat.view(np.uint8)
        if dtype.char in "gG" and np.finfo(dtype).nmant == 63:  # 80 bits, of 128 that it takes
            as_bytes = as_bytes.reshape(-1, 16)[:, :10].reshape(-1)
        return joined(tag, as_bytes.data)

    def _of_frame(self, value: Any) -> bytes | None:
        """Of a table of pandas, its values: how they lie in memory is another matter."""
        pandas = sys.modules.get("pandas")
        if pandas is None or not isinstance(value, pandas.Index | pandas.Series | pandas.DataFrame):
            return None
        if isinstance(value, pandas.DataFrame):
            columns = (self._of(value.iloc[:, place]) for place in range(value.shape[1]))
            return joined(b"frame", self._of(value.columns), self._of(value.index), *columns)
        names = self._of(list(value.names) if isinstance(value, pandas.Index) else value.name)
        index = self._of(value.index) if isinstance(value, pandas.Series) else b""
        if isinstance(value.dtype, np.dtype) and not value.dtype.hasobject:
            values = self._of_array(value.to_numpy())
        else:
            values = self._of(value.tolist())
        categories = getattr(value.dtype, "categories", None)
        more = b"" if categories is None else self._of((categories.tolist(), value.dtype.ordered))
        return joined(b"column", str(value.dtype).encode(), names, index, values, more)

    def _of_tensor(self, value: Any) -> bytes | None:
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(value, torch.Tensor):
            return None
        if value.layout != torch.strided or value.is_quantized or value.device.type == "meta":
            raise DigestError("of tensors only dense ones with values are known")
        plain = value.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        tag = type(value).__name__, str(value.dtype), tuple(value.shape), value.requires_grad
        values = memoryview(plain.view(torch.uint8).numpy()) if plain.numel() else b""
        return joined(b"tensor", repr((*tag, value.device.type)).encode(), values)

    def _of_object(self, value: Any) -> bytes:
        """Of any other object, what pickle would take of it."""
        if any(one.__name__ == "KerasSaveable" for one in type(value).__mro__):
            raise DigestError(
                "Keras writes the time into what it makes of a model; its get_weights() can be told"
            )
        reduced = _reduced(value)
        if isinstance(reduced, str):
            return joined(b"global", str(getattr(value, "__module__", "")).encode(), reduced.encode())
        function, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
        parts = [self._of(function), self._of(arguments), self._of_state(state)]
        parts += [self._of(list(part)) if part is not None else b"" for part in (items, pairs)]
        return joined(b"object", *parts)

    def _of_state(self, state: Any) -> bytes:
        if isinstance(state, tuple) and len(state) == 2:  # of a class with slots
            return joined(b"slots", *map(self._of_state, state))
        if type(state) is dict:  # in which order attributes were set does not count
            return joined(b"state", *sorted(self._pairs(state.items())))
        return self._of(state)

    def _pairs(self, items: Iterable[tuple[Any, Any]]) -> Iterable[bytes]:
        return (joined(self._of(name), self._of(value)) for name, value in items)


def _reduced(value: Any) -> Any:
    """What pickle would make an object from again."""
    reduce = copyreg.dispatch_table.get(type(value))
    return reduce(value) if reduce is not None else value.__reduce_ex__(4)
