"""Values as bytes and back without pickle: a tree of JSON, and blobs for what is large.

What is restored equals what was kept in types and bits; but two parts of a value that are one object become
two.  Reading runs no code but NumPy's own and, for tensors, ``torch.load(weights_only=True)``.
"""

from __future__ import annotations

import ast
import io
import struct
import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from fastpipe.core.extras import require

__all__ = ["Blob", "Blobs", "NotStorableError", "decode", "encode"]

Blob = bytes | memoryview
_Place = tuple[Any, Any]  # the place of what is around it, and the key or index there
_DEEPEST = 100  # JSON's reader and writer go as deep as Python's stack
_JSON_INTS = 1 << 63
_KINDS = {
    "OrderedDict", "array", "bytearray", "bytes", "complex", "dict", "float", "int", "numpy_bytes",
    "numpy_str", "scalar", "str", "tensor",
}  # fmt: skip
_double = struct.Struct(">d")
_SEQUENCES: dict[type, str] = {list: "list", tuple: "tuple", set: "set", frozenset: "frozenset"}
_CONTAINERS = {*_SEQUENCES, dict, OrderedDict}
_MAKERS: dict[str, Callable[[Any], Any]] = {name: kind for kind, name in _SEQUENCES.items()}


class NotStorableError(TypeError):
    """A value has a part that is not kept without pickle; the message says which."""


class Blobs(Protocol):
    """The blobs that ``encode`` made, wherever they are now."""

    def nbytes(self, number: int) -> int:
        """The size of one."""
        ...

    def into(self, number: int, memory: memoryview) -> None:
        """Copy one into memory of its size."""
        ...


def encode(value: object) -> tuple[Any, list[Blob]]:
    """A value as a tree for JSON, and blobs, which may be memory of the value's own.

    Raises:
        NotStorableError: it holds something else than None, numbers, strings, bytes, arrays, tensors, and
            lists, tuples, sets and dicts of those.

    >>> encode([1, 2.5, "x"])
    ({'value': ['list', [1, 2.5, 'x']], 'tensors': None}, [])
    """
    encoder = _Encoder()
    tree = {"value": encoder.node(value, ("it", None)), "tensors": encoder.tensors()}
    return tree, encoder.blobs


def decode(tree: Any, blobs: Blobs) -> Any:
    """The value again.

    Args:
        tree: as ``encode`` made it.
        blobs: likewise; only those are asked for that are needed.

    Raises:
        Exception: of any kind, where tree and blobs are not of ``encode``.

    >>> decode(*encode({"a": (1, None)}))
    {'a': (1, None)}
    """
    tensors = None
    if tree["tensors"] is not None:
        tensors = _loaded_tensors(_bytes(blobs, tree["tensors"]))
    return _Decoder(blobs, tensors).value(tree["value"])


class _Encoder:
    def __init__(self) -> None:
        self.blobs: list[Blob] = []
        self._tensors: dict[str, Any] = {}
        self._depth = 0

    def node(self, value: Any, place: _Place) -> Any:
        """A part of the tree: what JSON has itself, or a list of what it is and its content."""
        kind = type(value)
        if value is None or kind is bool or (kind is int and -_JSON_INTS < value < _JSON_INTS):
            return value
        if kind is float and value - value == 0:
            return value
        if kind is str and _is_text(value):
            return value
        scalar = self._scalar(value, kind)
        if scalar is not None:
            return scalar
        if kind is np.ndarray or isinstance(value, np.generic):
            return self._array(value, place)
        if kind not in _CONTAINERS:
            return self._tensor(value, place)
        self._depth += 1
        if self._depth > _DEEPEST:
            raise NotStorableError(f"{_words_of(place)[:60]}… is nested too deep, or holds itself")
        if kind in _SEQUENCES:
            node = [_SEQUENCES[kind], [self.node(one, (place, at)) for at, one in enumerate(value)]]
        else:
            node = self._dict(value, place)
        self._depth -= 1
        return node

    def tensors(self) -> int | None:
        """The blob with all tensors; None without any.  They are in one, as some share their memory."""
        if not self._tensors:
            return None
        file = io.BytesIO()
        sys.modules["torch"].save(self._tensors, file)
        return self._blob(file.getbuffer())

    def _blob(self, blob: Blob) -> int:
        self.blobs.append(blob)
        return len(self.blobs) - 1

    def _scalar(self, value: Any, kind: type) -> Any:
        if kind is int:
            return ["int", hex(value)]
        if kind is float:  # not a number, or infinite
            return ["float", _double.pack(value).hex()]
        if kind is complex:
            return ["complex", _double.pack(value.real).hex(), _double.pack(value.imag).hex()]
        if kind is str:  # with halves of characters, which JSON would join
            return ["str", value.encode("utf-8", "surrogatepass").hex()]
        if kind is np.str_:  # an array would cut off what looks like padding at its end
            return ["numpy_str", value.encode("utf-8", "surrogatepass").hex()]
        if kind is np.bytes_:
            return ["numpy_bytes", self._blob(bytes(value))]
        if kind in (bytes, bytearray):
            return [kind.__name__, self._blob(memoryview(value))]
        return None

    def _array(self, value: Any, place: _Place) -> Any:
        dtype = value.dtype
        words = _dtype_words(dtype)
        if words is None:
            raise NotStorableError(
                f"{_words_of(place)} is an array of dtype {dtype}, which NumPy's files do not keep"
            )
        array = np.asarray(value)
        is_fortran = array.flags.f_contiguous and not array.flags.c_contiguous
        flat = np.ascontiguousarray(array.T if is_fortran else array).reshape(-1)
        blob = self._blob(flat.view(np.uint8).data if flat.nbytes else b"")
        kind = "scalar" if isinstance(value, np.generic) else "array"
        return [kind, words, list(array.shape), is_fortran, blob]

    def _dict(self, value: Any, place: _Place) -> Any:
        pairs = [[self.node(key, place), self.node(one, (place, key))] for key, one in value.items()]
        if type(value) is dict:
            return ["dict", pairs]
        notes = vars(value)  # a state_dict has the versions of its layers there
        if set(notes) - {"_metadata"}:
            raise NotStorableError(f"{_words_of(place)} is an OrderedDict with attributes")
        return ["OrderedDict", pairs, self.node(dict(notes), place)]

    def _tensor(self, value: Any, place: _Place) -> Any:
        torch = sys.modules.get("torch")
        if torch is None or type(value) not in (torch.Tensor, torch.nn.Parameter):
            raise NotStorableError(f"{_words_of(place)} is a {_words(value)}")
        if type(value) is torch.Tensor and value.layout == torch.strided and not value.is_quantized:
            value = _without_the_rest(value)
        name = str(len(self._tensors))
        self._tensors[name] = value
        return ["tensor", name]


class _Decoder:
    def __init__(self, blobs: Blobs, tensors: Any) -> None:
        self._blobs = blobs
        self._tensors = tensors

    def value(self, node: Any) -> Any:
        if not isinstance(node, list):
            if isinstance(node, dict):
                raise ValueError("a dict of JSON is no node")
            return node
        kind, *content = node
        if kind in _MAKERS:
            return _MAKERS[kind]([self.value(one) for one in content[0]])
        if kind not in _KINDS:
            raise ValueError(f"there is no kind {kind!r} of value")
        return getattr(self, f"_{kind}")(*content)

    def _dict(self, pairs: Any) -> Any:
        return {self.value(key): self.value(one) for key, one in pairs}

    def _OrderedDict(self, pairs: Any, notes: Any) -> Any:  # noqa: N802
        made = OrderedDict((self.value(key), self.value(one)) for key, one in pairs)
        for name, note in self.value(notes).items():
            if name != "_metadata":
                raise ValueError(f"an OrderedDict has no attribute {name!r}")
            made._metadata = note  # type: ignore[attr-defined]
        return made

    def _int(self, digits: str) -> int:
        return int(digits, 16)

    def _float(self, digits: str) -> Any:
        return _double.unpack(bytes.fromhex(digits))[0]

    def _complex(self, real: str, imaginary: str) -> complex:
        return complex(self._float(real), self._float(imaginary))

    def _str(self, digits: str) -> str:
        return bytes.fromhex(digits).decode("utf-8", "surrogatepass")

    def _bytes(self, number: int) -> bytes:
        return _bytes(self._blobs, number)

    def _bytearray(self, number: int) -> bytearray:
        return bytearray(self._bytes(number))

    def _numpy_str(self, digits: str) -> np.str_:
        return np.str_(self._str(digits))

    def _numpy_bytes(self, number: int) -> np.bytes_:
        return np.bytes_(self._bytes(number))

    def _array(self, words: str, shape: Any, is_fortran: bool, number: int) -> npt.NDArray[Any]:
        dtype, nbytes = _dtype_of(words), self._blobs.nbytes(number)
        count = 1
        for length in shape:
            count *= length
        if count * dtype.itemsize != nbytes or dtype.hasobject:  # before any memory is asked for
            raise ValueError(f"an array {shape} of {dtype} has {nbytes} bytes")
        flat = np.empty(count, dtype)
        if nbytes:
            self._blobs.into(number, flat.view(np.uint8).data)
        return flat.reshape(shape[::-1]).T if is_fortran else flat.reshape(shape)

    def _scalar(self, *content: Any) -> Any:
        return self._array(*content)[()]

    def _tensor(self, name: str) -> Any:
        return self._tensors[name]


def _is_text(value: str) -> bool:
    """Whether a string has whole characters only."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _words_of(place: _Place) -> str:
    keys = []
    while place[1] is not None or isinstance(place[0], tuple):
        keys.append(f"[{place[1]!r}]")
        place = place[0]
    return "".join((str(place[0]), *reversed(keys)))


def _bytes(blobs: Blobs, number: int) -> bytes:
    memory = bytearray(blobs.nbytes(number))
    blobs.into(number, memoryview(memory))
    return bytes(memory)


def _dtype_words(dtype: np.dtype[Any]) -> str | None:
    """A dtype as the header of an .npy has it; None if that is not the same dtype again."""
    if dtype.hasobject or dtype.subdtype is not None or _has_metadata(dtype) or dtype.isbuiltin == 2:
        return None
    descr: Any = np.lib.format.dtype_to_descr(dtype)
    if isinstance(descr, str) and np.dtype(descr).char != dtype.char:  # a C long long, of a long's size
        descr = descr[0] + dtype.char
    if dtype.isalignedstruct:
        descr = ("aligned", descr)
    words = repr(descr)
    return words if _dtype_of(words) == dtype else None


def _dtype_of(words: str) -> np.dtype[Any]:
    descr = ast.literal_eval(words)
    is_aligned = isinstance(descr, tuple) and descr[0] == "aligned"
    made: Any = np.lib.format.descr_to_dtype(descr[1] if is_aligned else descr)
    if not is_aligned:
        return made  # type: ignore[no-any-return]
    fields = [made.fields[name] for name in made.names]
    content: Any = {"names": made.names, "itemsize": made.itemsize, "aligned": True}
    content |= {"formats": [field[0] for field in fields], "offsets": [field[1] for field in fields]}
    return np.dtype(content)  # type: ignore[no-any-return]


def _has_metadata(dtype: np.dtype[Any]) -> bool:
    if dtype.metadata is not None:
        return True
    if dtype.subdtype is not None:
        return _has_metadata(dtype.subdtype[0])
    return any(_has_metadata(field[0]) for field in (dtype.fields or {}).values())


def _without_the_rest(tensor: Any) -> Any:
    """A tensor without the larger memory of which it is a part, all of which would be written."""
    if tensor.untyped_storage().nbytes() <= tensor.numel() * tensor.element_size():
        return tensor
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _loaded_tensors(content: bytes) -> Any:
    torch = require("torch", extra="torch")
    try:
        return torch.load(io.BytesIO(content), weights_only=True)
    except RuntimeError:  # they were on a device that is not there
        return torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")


def _words(value: object) -> str:
    """What something is, and what to return in its place."""
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if any(one.__name__ == "KerasSaveable" for one in kind.__mro__):
        return f"{name}: return model.get_weights(), a list of arrays"
    if name.startswith("torch.nn.") or any(
        one.__module__ == "torch.nn.modules.module" for one in kind.__mro__
    ):
        return f"{name}: return model.state_dict()"
    if name.startswith("tensorflow."):
        return f"{name}: return an array, as its numpy() gives"
    return name
