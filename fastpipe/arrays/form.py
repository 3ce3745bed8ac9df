"""What a sample is made of: one value, a tuple or a dict of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fastpipe.errors import OptionError

__all__ = ["Form"]


class Form(NamedTuple):
    """What a sample is made of.

    Attributes:
        kind: ``"value"``, ``"tuple"`` or ``"dict"``.
        fields: the keys of a dict; else empty.
        names: paths of the datasets, in order.
    """

    kind: str
    fields: tuple[Any, ...]
    names: tuple[str, ...]

    @classmethod
    def of(cls, keys: Any) -> Form:
        """The form that ``keys=`` asks for.

        Raises:
            OptionError: it is none.
        """
        if isinstance(keys, str):
            return cls("value", (), (keys,))
        if isinstance(keys, Mapping):
            form = cls("dict", tuple(keys), tuple(keys.values()))
        elif isinstance(keys, Sequence) and not isinstance(keys, bytes):
            form = cls("tuple", (), tuple(keys))
        else:
            raise OptionError(
                f"keys must be a dataset's path, or a sequence or mapping of some, got {keys!r}"
            )
        wrong = [name for name in form.names if not isinstance(name, str)]
        if wrong or not form.names:
            raise OptionError(f"keys must name datasets by their paths, got {keys!r}")
        return form

    def sample(self, values: Sequence[Any]) -> Any:
        """A sample of these values, as a plain object."""
        if self.kind == "value":
            return values[0]
        return tuple(values) if self.kind == "tuple" else dict(zip(self.fields, values, strict=True))
