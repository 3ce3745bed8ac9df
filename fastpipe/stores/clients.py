"""Common parts of the clients of stores: options with secrets, a client for each process, and errors."""

from __future__ import annotations

import multiprocessing.context
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from fastpipe.core.locks import renew_in_children
from fastpipe.core.text import printable
from fastpipe.errors import ObjectChangedError, StoreAccessError, StoreBusyError, StoreError

T = TypeVar("T")


class PerProcess(Generic[T]):
    """Holds a client of a store.  Each process creates its own client at the first use."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._made: tuple[T] | None = None
        self._lock = threading.Lock()
        renew_in_children(self)

    def get(self) -> T:
        made = self._made
        if made is None:
            with self._lock:
                made = self._made = self._made or (self._make(),)
        return made[0]

    def drop(self) -> T | None:
        """Forget this process's client, and return it.  Return None if none was created."""
        made, self._made = self._made, None
        return None if made is None else made[0]

    def _after_fork(self) -> None:
        """Forget the parent's client, and the lock that another thread may have held."""
        if self._made is not None:
            _of_parents.append(self._made)
        self._made, self._lock = None, threading.Lock()


# Clients of parent processes.  They are never freed, because that would close the parent's connections.
_of_parents: list[object] = []

# A forked child does not have the threads of obstore, so calls of obstore wait forever or panic.  fastpipe
# imports obstore at the first use, so the import is the sign that the parent may have used obstore.
_is_child_of_user = False


def may_use_obstore() -> bool:
    """Return True unless this process was forked from a process that had imported obstore."""
    return not _is_child_of_user


def _note_fork() -> None:
    global _is_child_of_user
    _is_child_of_user = _is_child_of_user or "obstore" in sys.modules


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)


# The values of these options are shown.  For all other options that contain text or objects, only the names
# are shown, because the values may be secret.
_SHOWN = frozenset(
    (
        "account_name", "addressing_style", "anon", "endpoint_url", "profile", "project", "region_name",
        "requester_pays", "signature_version", "use_ssl",
    )
)  # fmt: skip
_HIDDEN = "…"
_SHORTEST_SECRET = 4  # shorter secrets are not hidden, because they occur in any text


class StorageOptions(Mapping[str, Any]):
    """The mapping that a user passed as ``storage_options``.

    ``repr`` hides secrets.  Pickles omit secrets, unless ``multiprocessing`` pickles to start a process.  The
    names of the omitted options are kept.  ``require`` then explains how to pass these options again.
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
        """Raise a ``StoreAccessError`` about ``path`` if secrets were omitted from a pickle."""
        if self._withheld:
            raise StoreAccessError(
                f"{path} was unpickled, and pickles hold no secrets: storage_options' "
                f"{', '.join(self._withheld)} were left out. Make it anew with storage_options=…, or let the "
                "environment or a credentials file have them from the beginning"
            )

    def hide(self, text: str) -> str:
        """Return ``text`` with each secret replaced by an ellipsis."""
        for secret in sorted(_secrets(self._options), key=len, reverse=True):
            text = text.replace(secret, _HIDDEN)
        return text


def _restore(options: dict[str, Any], withheld: tuple[str, ...]) -> StorageOptions:
    return StorageOptions(options, withheld=withheld)


def _is_plain(name: object, value: object) -> bool:
    """Return True if the value of an option may be shown."""
    if isinstance(value, str):
        return name in _SHOWN and "@" not in value  # an @ may follow credentials in a URL
    return value is None or isinstance(value, (bool, int, float))


def _shown(options: Mapping[Any, Any]) -> dict[Any, Any]:
    return {
        name: _shown(value) if isinstance(value, Mapping) else value if _is_plain(name, value) else _HIDDEN
        for name, value in options.items()
    }


def _plain(options: Mapping[Any, Any], within: str, withheld: list[str]) -> dict[Any, Any]:
    """Return the options that may be shown, and add the names of all other options to ``withheld``."""
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


_ACCESS_CODES = frozenset(
    (
        "AccessDenied", "AccountProblem", "AllAccessDisabled", "ExpiredToken", "InvalidAccessKeyId",
        "InvalidSecurity", "InvalidToken", "NotSignedUp", "RequestExpired", "RequestTimeTooSkewed",
        "SignatureDoesNotMatch", "TokenRefreshRequired",
    )
)  # fmt: skip
_BUSY_CODES = frozenset(
    ("SlowDown", "InternalError", "ServiceUnavailable", "RequestTimeout", "OperationAborted", "Throttling")
)
_ELSEWHERE_CODES = frozenset(
    ("AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "PermanentRedirect")
)
_BUSY = frozenset((408, 425, 429, 500, 502, 503, 504))
_REMEDY = (
    "Pass storage_options={'key': …, 'secret': …} ({'anon': True} for a public bucket), or set AWS_PROFILE, "
    "or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
)
_OTHER_REMEDY = "Pass storage_options=… with credentials, or let the environment have them"


def answer_error(path: str, at: str, status: int, code: str = "") -> OSError:
    """Return the error for an HTTP answer about a path.

    ``status`` is 0 if unknown.  ``code`` is the store's own name of the error, such as ``"NoSuchKey"``.
    """
    said = f"{status} {code}".strip() if status else code
    if status in (401, 403) or code in _ACCESS_CODES:
        remedy = _REMEDY if path.startswith("s3") else _OTHER_REMEDY
        return StoreAccessError(f"{path}: {at} refuses these credentials ({said}). {remedy}")
    if status == 404 or code.startswith("NoSuch"):
        return missing(path, at, code)
    if status == 412:
        return changed(path, at)
    if status in _BUSY or code in _BUSY_CODES:
        return StoreBusyError(f"{path}: {at} is busy ({said})")
    if status in (301, 302, 307, 308) or code in _ELSEWHERE_CODES:
        return StoreError(
            f"{path}: {at} says that it is elsewhere ({said}). Pass the bucket's region, as "
            "storage_options={'client_kwargs': {'region_name': …}}, or its 'endpoint_url'"
        )
    return StoreError(f"{path}: {at} answered {said}")


def missing(path: str, at: str, code: str = "") -> FileNotFoundError:
    if code == "NoSuchBucket":
        return FileNotFoundError(
            printable(f"{path}: {at} has no such bucket. See to its name, and to the endpoint")
        )
    why = "it was removed, or the bucket or the endpoint is another one than it was"
    return FileNotFoundError(printable(f"{path} is not there, says {at}: {why}"))


def changed(path: str, at: str) -> ObjectChangedError:
    remedy = "make the dataset anew, that of an image folder with refresh=True"
    return ObjectChangedError(f"{path} was replaced since it was listed, says {at}: {remedy}")


def no_answer(path: str, at: str, reason: str) -> StoreBusyError:
    return StoreBusyError(f"{path}: incomplete response from {at}: {reason}")
