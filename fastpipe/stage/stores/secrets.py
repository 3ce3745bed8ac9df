"""Options of a store, whose secrets appear nowhere but in the store itself."""

from __future__ import annotations

import multiprocessing.context
from collections.abc import Iterator, Mapping
from typing import Any

from fastpipe.errors import StoreAccessError

__all__ = ["StorageOptions"]

# Of all other options that hold text or objects only the names are shown: which of them are secret, only the
# program knows that takes them.
_SHOWN = frozenset(
    (
        "account_name", "addressing_style", "anon", "endpoint_url", "profile", "project", "region_name",
        "requester_pays", "signature_version", "use_ssl",
    )
)  # fmt: skip
_HIDDEN = "…"
_SHORTEST_SECRET = 4  # what is shorter would be found in any text


class StorageOptions(Mapping[str, Any]):
    """What a user gave as ``storage_options``: a mapping that does not change.

    ``repr`` shows no secrets, and a pickle has none, but for the one that ``multiprocessing`` makes to start
    a process.  Of those left out the names are known, and ``require`` says what to do.
    """

    def __init__(self, options: Mapping[str, Any] | None = None, *, withheld: tuple[str, ...] = ()) -> None:
        self._options = dict(options or {})
        self._withheld = withheld

    def __getitem__(self, name: str) -> Any:
        return self._options[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._options)

    def __len__(self) -> int:
        return len(self._options)

    def __repr__(self) -> str:
        return repr(_shown(self._options))

    def __copy__(self) -> StorageOptions:
        return self

    def __deepcopy__(self, memo: object) -> StorageOptions:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        if multiprocessing.context.get_spawning_popen() is not None:
            return _restore, (self._options, self._withheld)
        names: list[str] = []
        plain = _plain(self._options, "", names)
        return _restore, (plain, tuple(sorted({*self._withheld, *names})))

    def require(self, path: str) -> None:
        """Raise an error if secrets were left out.

        Args:
            path: of the store, for the message.

        Raises:
            StoreAccessError: they were.
        """
        if self._withheld:
            raise StoreAccessError(
                f"{path} was unpickled, and pickles hold no secrets: storage_options' "
                f"{', '.join(self._withheld)} were left out. Make it anew with storage_options=…, or let the "
                "environment or a credentials file have them from the beginning"
            )

    def hide(self, text: str) -> str:
        """A text in which no secret is left."""
        for secret in sorted(_secrets(self._options), key=len, reverse=True):
            text = text.replace(secret, _HIDDEN)
        return text


def _restore(options: dict[str, Any], withheld: tuple[str, ...]) -> StorageOptions:
    return StorageOptions(options, withheld=withheld)


def _is_plain(name: object, value: object) -> bool:
    """Whether a value may be seen by anyone."""
    if isinstance(value, str):
        return name in _SHOWN and "@" not in value  # which follows credentials in a URL
    return value is None or isinstance(value, (bool, int, float))


def _shown(options: Mapping[Any, Any]) -> dict[Any, Any]:
    return {
        name: _shown(value) if isinstance(value, Mapping) else value if _is_plain(name, value) else _HIDDEN
        for name, value in options.items()
    }


def _plain(options: Mapping[Any, Any], within: str, withheld: list[str]) -> dict[Any, Any]:
    """Those that may be seen; names of the others are added to ``withheld``."""
    found: dict[Any, Any] = {}
    for name, value in options.items():
        if isinstance(value, Mapping):
            found[name] = _plain(value, f"{within}{name}.", withheld)
        elif _is_plain(name, value):
            found[name] = value
        else:
            withheld.append(f"{within}{name}")
    return found


def _secrets(options: Mapping[Any, Any]) -> Iterator[str]:
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _secrets(value)
        elif isinstance(value, (list, tuple)):
            yield from _secrets(dict(enumerate(value)))
        elif isinstance(value, str) and not _is_plain(name, value) and len(value) >= _SHORTEST_SECRET:
            yield value
