"""Move corrupt files to a quarantine folder and back, and correct wrong file extensions."""

from __future__ import annotations

import contextlib
import errno
import filecmp
import json
import os
import re
import secrets
import shlex
import shutil
import stat
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from fastpipe.console import Progress
from fastpipe.core import files
from fastpipe.core.files import folder_below, rename_anew, sync_folder
from fastpipe.core.locks import locks_are_possible, try_to_lock
from fastpipe.core.private_folder import made_folder
from fastpipe.core.text import counted
from fastpipe.errors import OptionError
from fastpipe.tools import scan_images
from fastpipe.tools.scan_images import Findings, Verdict, check_is_the_same

LIST = "bad_samples.jsonl"
_MODE = 0o644  # permissions of the list file
_LEFT = re.compile(r"\.\d+\.[0-9a-f]{8}\.unfinished$")


def move(source: str, target: str) -> None:
    """Move the file or symbolic link ``source`` to ``target``, also to another file system.

    At any time, the complete file is at one of the two paths or at both.  A copy to another file system is
    complete and on the disk before the source is removed.  After an interruption, both paths may exist.  The
    same call then completes the move.
    """
    check_free(source, target)
    is_moved = False
    if not os.path.lexists(target):
        try:
            is_moved = rename_anew(source, target)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            _copy(source, target)
    sync_folder(os.path.dirname(target))
    if not is_moved:
        os.unlink(source)
    sync_folder(os.path.dirname(source))


def check_free(source: str, target: str) -> None:
    if os.path.lexists(target) and not _are_same(source, target):
        raise FileExistsError(errno.EEXIST, "a file of this name is there already", target)


def _copy(source: str, target: str) -> None:
    beside = f"{target}.{os.getpid()}.{secrets.token_hex(4)}{files.UNFINISHED}"
    try:
        if stat.S_ISLNK(os.lstat(source).st_mode):
            os.symlink(os.readlink(source), beside)
        else:
            with open(source, "rb", opener=files.open_regular) as old, open(beside, "xb") as new:
                shutil.copyfileobj(old, new, 1 << 20)
                new.flush()
                shutil.copystat(source, beside, follow_symlinks=False)
                os.fsync(new.fileno())
        if not rename_anew(beside, target):
            os.unlink(beside)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise


def _are_same(source: str, target: str) -> bool:
    old, new = os.lstat(source), os.lstat(target)
    if os.path.samestat(old, new) or stat.S_IFMT(old.st_mode) != stat.S_IFMT(new.st_mode):
        return os.path.samestat(old, new)
    if stat.S_ISLNK(new.st_mode):
        return os.readlink(source) == os.readlink(target)
    return stat.S_ISREG(new.st_mode) and filecmp.cmp(source, target, shallow=False)


def remove_unfinished(folder: str) -> None:
    with contextlib.suppress(OSError):
        for name in filter(_LEFT.search, os.listdir(folder)):
            path = os.path.join(folder, name)
            with contextlib.suppress(OSError):
                if os.lstat(path).st_uid == os.geteuid():
                    os.unlink(path)


def check_apart(folder: str, root: str) -> None:
    inner, outer = os.path.realpath(folder), os.path.realpath(root)
    for one, other in ((inner, outer), (outer, inner)):
        if os.path.commonpath((one, other)) == other:
            raise OptionError(
                f"--quarantine {folder}: it and {root} are one inside the other, where the "
                "files would still be in the way: name a folder elsewhere"
            )


class Quarantine:
    """A folder for corrupt files, with a list of their original paths.  This process locks the list.

    The list's line for a file is on the disk before the file is moved.  The list decides where restored files
    go, so only this user may be able to write to the list and the folder.  Symbolic links inside the folder,
    or below the folder to which files are restored, are not followed.
    """

    def __init__(self, folder: str, *, make: bool = True) -> None:
        self.folder = os.path.abspath(folder)
        if make:
            made_folder(self.folder, 0o755)
        elif not os.path.isfile(os.path.join(self.folder, LIST)):
            raise OptionError(f"nothing was moved to {folder}: it has no {LIST}")
        self._descriptor = -1
        self._opened = contextlib.ExitStack()
        try:
            # ``_here`` stays valid for this folder, even if another folder takes the same path.
            self._here = self._opened.enter_context(folder_below(self.folder, ""))
            self._list = os.path.join(self._here, LIST)
            self._open()
            self._records = self._read()
            if self._records:  # otherwise this folder has no moved files
                for inside, _, _ in os.walk(os.path.join(self._here, ".")):
                    remove_unfinished(inside)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
        self._opened.close()

    def __enter__(self) -> Quarantine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def take(self, root: str, path: str, verdict: Verdict) -> None:
        inside, name = os.path.split(path)
        before = self._records.get(path)
        with folder_below(root, inside) as old, folder_below(self._here, inside, makes=True) as new:
            source, target = os.path.join(old, name), os.path.join(new, name)
            check_is_the_same(source, verdict)
            is_ours = before is not None and before["root"] == root
            if not is_ours and os.path.lexists(target):  # for example the file of another root
                raise FileExistsError(errno.EEXIST, "a file of this name is there already", target)
            check_free(source, target)  # a copy that an interrupted move has left is allowed
            record = {"path": path, "root": root, "nbytes": verdict.nbytes, "reason": verdict.reason}
            if before != record:
                self._write(json.dumps(record).encode() + b"\n")
                self._records[path] = record
            move(source, target)

    def restore(self, root: str | None = None) -> tuple[list[str], list[tuple[str, str]]]:
        back: list[str] = []
        left: list[tuple[str, str]] = []
        cleaned: set[str] = set()
        named = None if root is None else os.path.realpath(root)  # the real path of a link
        for path, record in list(self._records.items()):
            inside, name = os.path.split(path)
            target = os.path.join(root or record["root"], path)
            if not os.path.lexists(os.path.join(self._here, path)):  # not moved yet, or restored already
                del self._records[path]
                continue
            try:
                with contextlib.ExitStack() as opened:
                    here = opened.enter_context(folder_below(self._here, inside))
                    base = _root_opened(named or record["root"], opened)
                    there = opened.enter_context(folder_below(base, inside, makes=True))
                    if os.path.dirname(target) not in cleaned:
                        cleaned.add(os.path.dirname(target))
                        remove_unfinished(there)
                    move(os.path.join(here, name), os.path.join(there, name))
            except OSError as error:
                left.append((target, error.strerror or str(error)))
                continue
            back.append(target)
            del self._records[path]
            with contextlib.suppress(OSError):
                while inside:
                    os.rmdir(os.path.join(self._here, inside))
                    inside = os.path.dirname(inside)
        self._finish()
        return back, left

    def _open(self) -> None:
        while self._descriptor < 0:  # repeated if another process replaces the list meanwhile
            path = os.path.join(self.folder, LIST)
            try:
                descriptor = files.open_regular(self._list, os.O_RDWR | os.O_CREAT | os.O_APPEND, _MODE)
            except OSError as error:
                raise OptionError(f"{path} cannot be used: {error.strerror}") from error
            with contextlib.ExitStack() as closing:
                closing.callback(os.close, descriptor)
                self._check_own(descriptor)
                if locks_are_possible() and not try_to_lock(descriptor):
                    raise OptionError(
                        f"another process is moving files to {self.folder}, or from there: wait"
                    )
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(descriptor), os.lstat(self._list)):
                        self._descriptor = descriptor
                        closing.pop_all()

    def _read(self) -> dict[str, dict[str, Any]]:
        # Read with this descriptor: closing another descriptor would release the lock.
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        text = b"".join(iter(lambda: os.read(self._descriptor, 1 << 20), b""))
        if text and not text.endswith(b"\n"):  # the last line is incomplete, so its file was not moved
            self._write(b"\n")
        found: dict[str, dict[str, Any]] = {}
        for line in text.split(b"\n"):
            try:
                record = json.loads(line)
                path = os.path.normpath(record["path"])
                is_outside = os.path.isabs(path) or path.split(os.sep)[0] == os.pardir
                is_a_file = path not in (os.curdir, LIST) and "\0" not in path
                root = record["root"]  # recorded roots are absolute and normalised
                is_whole = os.path.isabs(root) and os.path.normpath(root) == root and "\0" not in root
                if is_a_file and not is_outside and is_whole:
                    found[path] = record
            except (ValueError, KeyError, TypeError, AttributeError):
                continue
        return found

    def _write(self, line: bytes) -> None:
        while line:
            line = line[os.write(self._descriptor, line) :]
        os.fsync(self._descriptor)
        sync_folder(self._here)

    def _finish(self) -> None:
        if not self._records:
            os.unlink(self._list)
            with contextlib.suppress(OSError):  # the folder is not empty
                os.rmdir(self.folder)
            return
        lines = [json.dumps(record).encode() + b"\n" for record in self._records.values()]
        files.write_whole(self._list, lambda file: file.writelines(lines), sync=True, mode=_MODE)

    def _check_own(self, descriptor: int) -> None:
        listed = os.path.join(self.folder, LIST)
        folder = os.open(self._here, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
        try:
            for path, status in ((self.folder, os.fstat(folder)), (listed, os.fstat(descriptor))):
                why = files.who_else_may_write(folder, status, root_may=True)
                if why:
                    raise OptionError(
                        f"{path} {why}: users who can write there decide what is moved where. Name another "
                        f"folder; or check {LIST}, and take sole ownership of both with  chown  and  "
                        f"chmod go-w {shlex.quote(self.folder)} {shlex.quote(listed)}"
                    )
        finally:
            os.close(folder)


def _root_opened(root: str, opened: contextlib.ExitStack) -> str:
    try:
        return opened.enter_context(folder_below(os.sep, root.lstrip(os.sep)))
    except FileNotFoundError:
        why = f"there is no folder {root}: make it first, or name another one"
        raise FileNotFoundError(errno.ENOENT, why, root) from None


@dataclass
class Done:
    moved: list[str] = field(default_factory=list)
    renamed: list[tuple[str, str]] = field(default_factory=list)
    left: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def move_corrupt(found: Findings, folder: str, progress: Progress) -> Done:
    check_apart(folder, found.root)
    root, done, seen = os.path.realpath(found.root), Done(), set()
    if not found.corrupt:
        return done
    with Quarantine(folder) as quarantine:
        for number, verdict in enumerate(found.corrupt):
            progress.now(f"moving {number + 1:,} of {len(found.corrupt):,} files to {folder}")
            name = os.path.relpath(verdict.path, found.root)
            try:
                path = _place(root, verdict)
                if path in seen:  # already moved, through a link to its folder
                    done.moved.append(name)
                    continue
                quarantine.take(root, os.path.relpath(path, root), verdict)
            except OSError as error:
                done.left.append((name, error.strerror or str(error)))
                continue
            seen.add(path)
            done.moved.append(name)
    gone = Counter(name.split(os.sep)[0] for name in done.moved)
    empty = [name for name, count in gone.items() if count == found.classes.get(name)]
    if empty:
        done.notes.append(scan_images.without_images("an image any more", empty))
    return done


def rename(found: Findings, progress: Progress) -> Done:
    """Rename readable images whose extension is wrong.  The new extension fits the format of the content."""
    root, done = os.path.realpath(found.root), Done()
    wrong = [one for one in found.noted if not scan_images.name_fits(one.path, one.kind)]
    targets = _linked_to(root) if wrong else set()
    seen: set[str] = set()
    for number, verdict in enumerate(wrong):
        progress.now(f"renaming {number + 1:,} of {len(wrong):,} files")
        name = os.path.relpath(verdict.path, found.root)
        try:
            endings = scan_images.extensions_of(verdict.kind)
            if not endings:
                raise OSError(f"ImageFolder takes no name of a {verdict.kind}, and would lose it")
            path = _place(root, verdict)
            if path in seen:  # already renamed, through a link to its folder
                continue
            seen.add(path)
            if not os.path.islink(path) and os.path.realpath(path) in targets:
                raise OSError("a link leads to it by its name")
            inside, old = os.path.split(os.path.relpath(path, root))
            new = os.path.splitext(old)[0] + endings[0]
            with folder_below(root, inside) as folder:
                check_is_the_same(os.path.join(folder, old), verdict)
                if os.path.lexists(os.path.join(folder, new)):
                    raise OSError(f"{new} is there already")
                move(os.path.join(folder, old), os.path.join(folder, new))
        except OSError as error:
            done.left.append((name, error.strerror or str(error)))
            continue
        done.renamed.append((name, os.path.splitext(name)[0] + endings[0]))
    if found.corrupt:
        done.notes.append(
            f"not repaired: {counted(len(found.corrupt), 'corrupt file')}. Missing data, such as the end "
            "of a truncated JPEG, cannot be restored"
        )
    return done


def _place(root: str, verdict: Verdict) -> str:
    folder, name = os.path.split(verdict.path)
    real = os.path.realpath(folder)
    if os.path.commonpath((real, root)) != root:
        raise OSError(f"it is outside, in {real}, to which a link leads: scan that folder itself")
    return os.path.join(real, name)


def _linked_to(root: str) -> set[str]:
    paths = (os.path.join(folder, name) for folder, _, names in os.walk(root) for name in names)
    return {os.path.realpath(path) for path in paths if os.path.islink(path)}
