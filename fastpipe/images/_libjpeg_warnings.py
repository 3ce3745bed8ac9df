"""Keeps the libjpeg that DALI decodes with from printing to the terminal.

For a damaged JPEG that it can decode all the same, libjpeg prints a line such as "Corrupt JPEG
data: premature end of data segment" with ``fprintf(stderr, …)``, without the file's name, in
every epoch.  Pillow decodes the same files silently.  The library has no setting for this, and
descriptor 2 belongs to the whole process, so it cannot be turned away while one thread decodes.

What can be changed is where that one library finds ``fprintf``: the entry in its own table of
imported functions (ELF's procedure linkage table, which the dynamic linker fills in).  The entry
is replaced by a C function that does nothing.  Nothing else in the process is touched.  Every
step is checked, and where anything is not as expected the entry is left alone, which costs
those lines on the terminal and nothing more.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import sys
from pathlib import Path
from typing import NamedTuple

__all__ = ["silence", "silence_codecs"]

# ELF64 relocation types for imported functions: x86-64 and AArch64.
_JUMP_SLOTS = {62: 7, 183: 1026}
_SHT_RELA, _SHT_DYNSYM = 4, 11


# nvImageCodec's, with which DALI decodes.  If libjpeg-turbo gives up on a file, OpenCV's own copy of libjpeg
# is tried.
_CODECS = ("libjpeg_turbo_ext", "libopencv_ext")


class _Mapping(NamedTuple):
    start: int
    end: int
    access: str
    offset: int
    path: str


def silence(library: str, function: str = "fprintf") -> bool:
    """Make one loaded library's calls of a C function do nothing.

    Args:
        library: begins the file name of the library.
        function: a function of the C library whose result the library does not use.

    Returns:
        Whether it was done.
    """
    if not sys.platform.startswith("linux") or ctypes.sizeof(ctypes.c_void_p) != 8:
        return False
    try:
        mappings = [m for m in _mappings() if Path(m.path).name.startswith(library)]
        base = next((m.start for m in mappings if m.offset == 0), None)
        if base is None:
            return False
        slot = _slot_in(mappings[0].path, function)
        if slot is None:
            return False
        return _replace(base + slot, function, mappings)
    except (OSError, ValueError, struct.error, AttributeError):
        return False


def silence_codecs() -> None:
    """Silence the libraries that DALI has loaded.

    To be called for each new pipeline: they are loaded with the first and unloaded with the last that there
    is, and print again when they are loaded anew.
    """
    for library in _CODECS:
        silence(library)


def _replace(address: int, function: str, mappings: list[_Mapping]) -> bool:
    """Point a table entry at a function without effect, if the entry is what it should be."""
    if not any(m.start <= address <= m.end - 8 and m.access.startswith("rw") for m in mappings):
        return False
    libc = ctypes.CDLL(None)
    real = ctypes.cast(getattr(libc, function), ctypes.c_void_p).value
    nothing = ctypes.cast(libc.getpid, ctypes.c_void_p).value  # no arguments, no effect
    entry = ctypes.c_uint64.from_address(address)
    # Bound already, or still pointing into the library for the linker to bind at the first call.
    unbound = any(m.start <= entry.value < m.end and "x" in m.access for m in mappings)
    if nothing is None or not (entry.value == real or unbound):
        return entry.value == nothing
    entry.value = nothing
    return True


def _mappings() -> list[_Mapping]:
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].startswith("/"):
            start, end = (int(part, 16) for part in fields[0].split("-"))
            found.append(_Mapping(start, end, fields[1], int(fields[2], 16), fields[5]))
    return found


@functools.cache
def _slot_in(path: str, function: str) -> int | None:
    """``_slot`` in a library's file."""
    return _slot(Path(path).read_bytes(), function)


def _slot(elf: bytes, function: str) -> int | None:
    """Offset of an imported function's table entry from the library's load address."""
    if elf[:6] != b"\x7fELF\x02\x01":  # 64 bits, little-endian
        return None
    machine, section_offset = struct.unpack_from("<H", elf, 18)[0], struct.unpack_from("<Q", elf, 40)[0]
    entry_size, count = struct.unpack_from("<HH", elf, 58)
    starts = range(section_offset, section_offset + count * entry_size, entry_size)
    sections = [struct.unpack_from("<IIQQQQIIQQ", elf, start) for start in starts]
    for section in sections:
        symbols = sections[section[6]] if section[1] == _SHT_RELA else None
        if symbols is None or symbols[1] != _SHT_DYNSYM:
            continue
        strings = sections[symbols[6]][4]
        for position in range(section[4], section[4] + section[5], 24):
            slot, info, _ = struct.unpack_from("<QQq", elf, position)
            if info & 0xFFFFFFFF != _JUMP_SLOTS.get(machine):
                continue
            name = strings + struct.unpack_from("<I", elf, symbols[4] + (info >> 32) * 24)[0]
            if elf[name : elf.index(b"\0", name)] == function.encode():
                return int(slot)
    return None
