"""Open, read and write files safely."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import secrets
import shutil
import stat
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, ParamSpec, TypeVar

from fastpipe.core.archive_paths import find_member, read_member
from fastpipe.core.clock import ranged

# Opening a file never hangs.  fastpipe's own files are not opened through links, and are written atomically.
# If no descriptor is left, idle files are closed.  This module also detects URLs.

P = ParamSpec("P")
T = TypeVar("T")

_SPENT = {errno.EMFILE, errno.ENFILE}
_MOST_LOOKED_AT = 1 << 16
# A single letter is a Windows drive.
SCHEME = re.compile(r"([a-z][a-z0-9+.\-]+(?:::[a-z][a-z0-9+.\-]+)*)://", re.IGNORECASE)
# Folder with a path for each open descriptor.  The path of an open folder there stays valid when the folder
# is moved or replaced.
DESCRIPTORS = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else ""
UNFINISHED = ".unfinished"  # suffix of a file's name while it is written

# O_NONBLOCK: a fifo would block open() until a process writes to it.
_SAFE = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
_SAFE |= getattr(os, "O_BINARY", 0) | getattr(os, "O_NOCTTY", 0)
_NO_LINKS = getattr(os, "O_NOFOLLOW", 0)

# Errors of file systems that have no hard links or allow them only to owners, and of too many links.
_NO_LINK = {errno.EPERM, errno.EACCES, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EMLINK}
_HERE, _NOREPLACE = -100, 1  # AT_FDCWD and RENAME_NOREPLACE of renameat2(2)


def open_regular(
    path: str | os.PathLike[str],
    flags: int = os.O_RDONLY,
    mode: int = 0o666,
    *,
    follows: bool = False,
    dir_fd: int | None = None,
) -> int:
    """Open a regular file, without waiting on a fifo or triggering a device.

    The path may be a symbolic link only if ``follows`` is True.

    Raises:
        OSError: the errors of ``os.open``, and an error for a directory, a fifo, a socket or a device.
    """
    descriptor = os.open(path, flags | _SAFE | (0 if follows else _NO_LINKS), mode, dir_fd=dir_fd)
    try:
        require_regular(path, os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def require_regular(path: str | os.PathLike[str], status: os.stat_result) -> None:
    """Raise an OSError unless ``status`` is the status of a regular file."""
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "Not a regular file", os.fspath(path))


def write_whole(
    path: str | os.PathLike[str],
    fill: Callable[[BinaryIO], object],
    *,
    sync: bool = False,
    mode: int = 0o666,
    unfinished: Path | None = None,
    dir_fd: int | None = None,
) -> None:
    """Create or replace a file atomically, so a reader finds the complete old file or the complete new file.

    If ``path`` is a link, the link itself is replaced.  Without ``sync``, a crash of the machine may leave an
    empty file.  The file is written as ``unfinished`` and then renamed.  By default, ``unfinished`` is an
    unguessable name in the folder of ``path``.  A caller passes its own name, in a private folder, to find
    the files of killed processes later.  If ``dir_fd`` is given, the paths are relative to this open folder,
    and ``sync`` does not sync the folder itself.
    """
    path = Path(path)
    try:
        if unfinished is None:
            unfinished = path.with_name(f".{path.name[:100]}.{secrets.token_hex(8)}{UNFINISHED}")
        else:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(unfinished, dir_fd=dir_fd)
        # O_EXCL creates a new file, so a link that another user has put there is not followed.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with os.fdopen(open_regular(unfinished, flags, mode, dir_fd=dir_fd), "wb") as file:
            fill(file)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        os.replace(unfinished, path, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
    except BaseException:
        if unfinished is not None:
            with contextlib.suppress(OSError):
                os.unlink(unfinished, dir_fd=dir_fd)
        raise
    if sync and dir_fd is None:
        sync_folder(path.parent)


def open_output(path: str | os.PathLike[str], *, appends: bool = False) -> int:
    """Open a file named by the user for writing.  Truncate the file, or append to it if ``appends``.

    The file may be a pipe with a reader, such as a shell's ``>(...)``, or ``/dev/stdout``.  A fifo without
    a reader, or a link that belongs to another user, is an OSError.
    """
    flags = os.O_WRONLY | os.O_CREAT | (os.O_APPEND if appends else os.O_TRUNC)
    try:
        descriptor = os.open(path, flags | _SAFE | _NO_LINKS, 0o666)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise OSError(errno.ENXIO, "It is a fifo or socket that nobody reads", os.fspath(path)) from None
        if error.errno not in (errno.ELOOP, errno.EMLINK):
            raise
        if os.lstat(path).st_uid not in (0, os.geteuid()):
            raise PermissionError(errno.EPERM, "It is a link of another user", os.fspath(path)) from None
        descriptor = os.open(path, flags | _SAFE, 0o666)
    if hasattr(os, "set_blocking"):
        os.set_blocking(descriptor, True)
    return descriptor


def write_output(path: str | os.PathLike[str], text: str) -> None:
    """Write a text in UTF-8 to a file named by the user.  The file is opened by ``open_output``."""
    with os.fdopen(open_output(path), "w", encoding="utf-8") as file:
        file.write(text)


def rename_anew(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> bool:
    """Rename a file, or raise FileExistsError if a file ``target`` exists.

    Return True if the file was renamed.  Return False if the file now has both names and the caller must
    still remove ``source``.
    """
    if _renameat2 is not None:
        if _renameat2(_HERE, os.fsencode(source), _HERE, os.fsencode(target), _NOREPLACE) == 0:
            return True
        number = ctypes.get_errno()
        if number not in (errno.EINVAL, errno.ENOSYS):  # a file system, or kernel, without this flag
            raise OSError(number, os.strerror(number), os.fspath(source), None, os.fspath(target))
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _NO_LINK:
            raise
        # A file that another process creates at ``target`` between these lines is lost.
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fspath(target)) from None
        os.rename(source, target)
        return True
    return False


def _linux_call() -> Any:
    """Return Linux's ``renameat2``, for which Python has no wrapper; None on other systems."""
    if sys.platform != "linux":
        return None
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is not None:
        call.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    return call


_renameat2 = _linux_call()


def remove_tree(path: str | os.PathLike[str]) -> None:
    try:
        is_folder = stat.S_ISDIR(os.lstat(path).st_mode)  # rmtree would wait for a fifo's writer
    except FileNotFoundError:
        return
    if is_folder:
        shutil.rmtree(path)
    else:
        os.unlink(path)


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Flush the names of the files in a folder to the disk, if the system supports that."""
    with contextlib.suppress(OSError):  # Windows opens no folders
        descriptor = os.open(folder, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def parents_made(path: str | os.PathLike[str]) -> Iterator[None]:
    """Make the missing folders above ``path``; if the ``with`` block raises, remove those that are empty."""
    folder, missing = Path(path).parent, []
    while not os.path.lexists(folder):
        missing.append(folder)
        folder = folder.parent
    try:
        for one in reversed(missing):
            one.mkdir(exist_ok=True)
        yield
    except BaseException:
        for one in missing:
            with contextlib.suppress(OSError):  # it is not there, or somebody has put something in it
                one.rmdir()
        raise


@contextlib.contextmanager
def folder_below(root: str | os.PathLike[str], inside: str, *, makes: bool = False) -> Iterator[str]:
    """Open the folder ``root/inside`` without following links, and give the ``with`` block its path.

    ``inside`` is relative, without ``..``, or empty.  ``root`` itself may be a link.  On Linux the path leads
    to the opened folder even if another folder replaces it.  ``makes`` creates missing folders.
    """
    flags = getattr(os, "O_PATH", os.O_RDONLY) | getattr(os, "O_DIRECTORY", 0) | _SAFE
    descriptor = os.open(root, flags)
    try:
        for part in Path(inside).parts:
            if makes:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, 0o755, dir_fd=descriptor)
            try:
                below = os.open(part, flags | _NO_LINKS, dir_fd=descriptor)
            except OSError as error:
                if error.errno not in (errno.ELOOP, errno.ENOTDIR):
                    raise
                why = f"{part!r} on the way is a link, or no folder"
                raise NotADirectoryError(errno.ENOTDIR, why, os.path.join(root, inside)) from None
            os.close(descriptor)
            descriptor = below
        yield f"{DESCRIPTORS}/{descriptor}" if DESCRIPTORS else os.path.join(root, inside)
    finally:
        os.close(descriptor)


def who_else_may_write(descriptor: int, status: os.stat_result, *, root_may: bool = False) -> str:
    """Return a text that says who else may write to a file or folder; "" if only this user may write.

    With ``root_may``, root may write too.  Some file systems show all files as files of one user, or have no
    modes.  So the function creates a file in the folder ``descriptor``, and accepts the owner and the mode
    that this new file has.
    """
    if not hasattr(os, "geteuid"):  # on Windows, modes have no meaning
        return ""
    is_own = status.st_uid == os.geteuid() or (root_may and status.st_uid == 0)
    others = stat.S_IMODE(status.st_mode) & 0o022
    if is_own and not others:
        return ""
    made = _made_there(descriptor)
    if not is_own and (made is None or made.st_uid != status.st_uid):
        return f"belongs to user {status.st_uid}, not to user {os.geteuid()}, who runs this"
    if others & ~(0 if made is None else made.st_mode):
        return f"lets others write (mode {stat.S_IMODE(status.st_mode):04o})"
    return ""


def _made_there(descriptor: int) -> os.stat_result | None:
    """Create and remove a file of mode 0600 in a folder, and return its status; None if that fails."""
    name = f".{secrets.token_hex(8)}{UNFINISHED}"
    try:
        made = open_regular(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=descriptor)
    except OSError:
        return None
    try:
        os.unlink(name, dir_fd=descriptor)
        return os.fstat(made)
    finally:
        os.close(made)


# Functions that close idle files.  A file is idle if it is only kept open for later reads.
_closing: list[Callable[[], object]] = []


def closes_idle(function: Callable[[], T]) -> Callable[[], T]:
    """Register a function that closes idle files.  It is called when no file descriptor is left."""
    _closing.append(function)
    return function


def retrying_open(function: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
    """Call a function that opens something.

    If no file descriptor is left, close idle files and call the function again.
    """
    try:
        return function(*args, **named)
    except OSError as error:
        if not is_spent(error):
            raise
    for close in _closing:
        close()
    try:
        return function(*args, **named)
    except OSError as error:
        if not is_spent(error):
            raise
        raise OSError(error.errno or errno.EMFILE, _what_is_open(), error.filename) from error


def is_spent(error: BaseException) -> bool:
    """Return whether an error means that no file descriptor is left in this process or on the machine."""
    return isinstance(error, OSError) and error.errno in _SPENT


def is_tight(descriptor: int) -> bool:
    """Return whether half of this process's descriptors are in use.  ``descriptor`` was just opened.

    The system always opens the lowest free number.  So a large number shows that many descriptors are in use.
    """
    limit = _limit()
    return limit is not None and descriptor >= limit // 2


def _limit() -> int | None:
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return None
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def _what_is_open() -> str:
    limit = _limit()
    if limit is None:
        return os.strerror(errno.ENFILE)
    kinds: Counter[str] = Counter()
    for number in range(min(limit, _MOST_LOOKED_AT)):  # listing the folder would need a descriptor
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue
        kinds[_kind(target)] += 1
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    return (
        f"Too many open files: this process may have {limit} (ulimit -n)"
        + (f", and has {counts}" if counts else "")
        + ". Raise the limit before the program starts, as by 'ulimit -n 4096', or use fewer worker "
        "processes and threads"
    )


def _kind(target: str) -> str:
    if target.startswith(("pipe:", "socket:")):
        return f"{target.partition(':')[0]}s"
    return "files" if re.match(r"/(?!memfd:|dev/)", target) else "others"


def is_url(root: str | os.PathLike[str]) -> bool:
    """Return whether a dataset's root is the URL of a store, not a folder.

    >>> is_url("s3://bucket/train"), is_url("/data/train"), is_url("/data/odd://name"), is_url("C:\\\\data")
    (True, False, False, False)
    """
    return isinstance(root, str) and SCHEME.match(root) is not None


# Safe reading of files.  A fifo does not hang, a directory raises an error, and a short read is continued.

_SIGNATURE = b"\x89HDF\r\n\x1a\n"  # the first bytes of an HDF5 file


def open_file(path: str, flags: int = 0) -> int:
    """Open a regular file for reading.  ``open`` accepts this function as ``opener``.  Ignore ``flags``."""
    return retrying_open(open_regular, path, follows=True)


@contextmanager
def lent(file: Any, path: str) -> Iterator[int]:
    """Give a ``with`` block the descriptor of a ``native.DataFile``, which may stay open for later reads.

    Raises:
        OSError: the errors of ``open``, and ``errno.ESTALE`` if the file has changed.
    """
    try:
        held = retrying_open(file.lend)
    except OSError as error:
        error.filename = path
        raise
    try:
        yield held.descriptor
    finally:
        held.give_back()


def regular_status(path: str) -> os.stat_result:
    """Return the status of a regular file that a library will open by its path."""
    status = os.stat(path)
    require_regular(path, status)
    return status


@ranged("read")
def read_file(path: str) -> bytes:
    """Return the bytes of a regular file, or of a member of an archive (``core/archive_paths.py``)."""
    member = find_member(path)
    descriptor = open_file(path if member is None else member.archive)
    try:
        if member is not None:
            return read_member(descriptor, member, path)
        size = os.fstat(descriptor).st_size
        blocks = [os.read(descriptor, size + 1)]  # nearly always the whole file
        while len(blocks[0]) != size and blocks[-1]:
            blocks.append(os.read(descriptor, 1 << 20))
        return blocks[0] if len(blocks) == 1 else b"".join(blocks)
    finally:
        os.close(descriptor)


def read_at(descriptor: int, memory: Any, offset: int) -> int:
    """Fill ``memory`` (uint8, C-contiguous) with bytes of a file from ``offset`` on.

    Return the number of bytes read.  This number is smaller than the memory if the file ends before.
    """
    view, done = memoryview(memory), 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done:]], offset + done)
        if not count:
            break
        done += count
    return done


def is_hdf5(path: str) -> bool:
    return hdf5_signature(path) is not None


def hdf5_signature(path: str) -> int | None:
    """Return the offset of the HDF5 signature in a file.

    Return None if the file has no signature or is not a regular file.
    """
    if not os.path.isfile(path):
        return None
    with open(path, "rb", opener=open_file) as file:
        end, at = os.fstat(file.fileno()).st_size, 0
        while at < end:
            file.seek(at)
            if file.read(len(_SIGNATURE)) == _SIGNATURE:
                return at
            at = 2 * at or 512
    return None
