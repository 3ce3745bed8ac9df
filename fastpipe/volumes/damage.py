"""Errors by which libraries say that they cannot make sense of a file, as errors that name it."""

from __future__ import annotations

import errno
import lzma
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

from fastpipe.core.extras import missing_package
from fastpipe.errors import FastpipeError, VolumeError

__all__ = ["UNREADABLE", "as_volume_error", "shortened"]

# Parsers raise these about bytes that are not what they expect.  A package that cannot be imported, memory
# or descriptors that run out and files that must not be opened are none of them.
UNREADABLE: tuple[type[Exception], ...] = (
    ArithmeticError, AssertionError, AttributeError, EOFError, LookupError, RuntimeError, SyntaxError,
    TypeError, ValueError, lzma.LZMAError, struct.error, zipfile.BadZipFile, zlib.error,
)  # fmt: skip
_OF_CONTENT = (None, errno.EINVAL)  # an offset that no file has, or what a library found out by itself
_MOST_TEXT = 300  # characters of a library's message, which may repeat a whole header


@contextmanager
def as_volume_error(what: str, *others: type[Exception]) -> Iterator[None]:
    """Raise what a library finds wrong with a file within the block as a VolumeError.

    Args:
        what: how the message begins, with the file's name: ``"x.tif cannot be read as TIFF"``.
        others: errors of the library's own beside ``UNREADABLE``.

    Raises:
        MissingDependencyError: the library needs a package that is not installed.
        VolumeError: it cannot make sense of the file, or needs more memory for it than there is.
        Others: errors that say nothing about the file's content, as they are.
    """
    try:
        yield
    except FastpipeError:
        raise
    except ModuleNotFoundError as error:
        raise missing_package(error) from error
    except MemoryError:
        raise VolumeError(f"{what}: what it says of itself takes more memory than there is") from None
    except OSError as error:
        if error.errno not in _OF_CONTENT:
            raise
        raise VolumeError(f"{what}: {shortened(error)}") from None
    except (*UNREADABLE, *others) as error:
        raise VolumeError(f"{what}: {type(error).__name__}: {shortened(error)}") from None


def shortened(what: object) -> str:
    """Return a text, or the beginning of one that is too long for a message.

    >>> shortened("short")
    'short'
    """
    text = str(what)
    return text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]} …"
