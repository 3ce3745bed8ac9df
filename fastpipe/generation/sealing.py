"""The key that tells entries of this user from those of others, without which nothing is unpickled.

It lies in the user's folder of settings, never beside the entries: whoever else makes entries, or puts a
folder of them there, has no key to seal them with.
"""

from __future__ import annotations

import hmac
import os
import secrets
import stat
from pathlib import Path

from fastpipe.core.private_folder import PrivateFolder
from fastpipe.errors import CacheError

try:
    import fcntl
except ImportError:  # on Windows, where nothing is kept
    fcntl = None  # type: ignore[assignment]

__all__ = ["SEAL_BYTES", "key_path", "new_seal", "sealing_key"]

SEAL_BYTES = 32
_NAME = "memoize.key"
_KEY_BYTES = 32


def key_path() -> Path:
    """Where the key is, or will be: ``~/.config/fastpipe/memoize.key``, or as ``XDG_CONFIG_HOME`` says."""
    import platformdirs  # most programs never need it

    return platformdirs.user_config_path("fastpipe", appauthor=False) / _NAME


def sealing_key() -> bytes:
    """The user's key, which is made when it is first needed.

    Raises:
        CacheError: its folder or file cannot be used, or is not the user's alone.
    """
    path = key_path()
    if not path.is_absolute():
        raise CacheError("there is no folder for the key of pickled entries: this user has no home")
    with PrivateFolder(path.parent) as folder:
        try:
            descriptor = _open(folder)
        except OSError as error:
            raise CacheError(
                f"the key of pickled entries, {str(path)!r}, cannot be used: {error.strerror or error}"
            ) from error
        try:
            _check(descriptor, path)
            return _read(descriptor)
        finally:
            os.close(descriptor)


def new_seal(key: bytes) -> hmac.HMAC:
    """What makes a seal of bytes that it is given piece by piece: HMAC-SHA256."""
    return hmac.new(key, digestmod="sha256")


def _open(folder: PrivateFolder) -> int:
    try:
        return folder.open(_NAME, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    except FileExistsError:
        return folder.open(_NAME, os.O_RDWR)


def _check(descriptor: int, path: Path) -> None:
    status = os.fstat(descriptor)
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid != os.geteuid() or mode & 0o077:
        raise CacheError(
            f"the key of pickled entries, {str(path)!r}, must be a file of user {os.geteuid()} that nobody "
            f"else may open: it is of user {status.st_uid} and has mode {mode:04o}. Remove it; entries under "
            "it are computed again then"
        )


def _read(descriptor: int) -> bytes:
    """The key, which whoever has the file first writes; all others wait for that."""
    fcntl.flock(descriptor, fcntl.LOCK_EX)  # ends as the descriptor is closed
    key = os.pread(descriptor, _KEY_BYTES, 0)
    if len(key) < _KEY_BYTES:  # new, or of somebody who ended just then and has sealed nothing
        key = secrets.token_bytes(_KEY_BYTES)
        os.pwrite(descriptor, key, 0)
        os.fsync(descriptor)
    return key
