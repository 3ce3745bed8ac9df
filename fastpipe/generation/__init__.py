"""Samples that a function makes: by all cores, stored once, never lost; and results that are kept.

=====================================  =====================================================
``public``                             ``generate`` and ``probe``; ``asked``: their arguments, checked
``generating`` ``outcome``             one call, from what is there to the last name; what came of it
``first`` ``form``                     the first row; columns of samples
``seeds``                              a row's own random numbers
``making`` ``blocks`` ``work``         rows made by the function, as arrays; what a worker runs
``crews`` ``processes`` ``limits``     who makes blocks: this thread, threads, processes, a cluster
``scheduling`` ``interrupts``          blocks in flight; Ctrl-C
``layout`` ``storing`` ``journal``     where rows are in the files; writing them; what is done
``job`` ``finishing``                  whether it is the same job; the structure around the rows
``probing`` ``reporting``              a look before; how far it is
``memoizing`` ``entries`` ``values``   results that are kept, in files, without pickle
``fingerprints`` ``code_version``      by arguments, data and code; ``sealing``: where pickle is asked for
=====================================  =====================================================
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastpipe.core.extras import load_part, load_rich

if TYPE_CHECKING:
    from fastpipe.generation.memoizing import memoize
    from fastpipe.generation.outcome import Generated
    from fastpipe.generation.probing import ProbeReport
    from fastpipe.generation.public import generate, probe

__all__ = ["Generated", "ProbeReport", "generate", "memoize", "probe"]

# Loaded when first used: a worker that starts loads none of them.  No module has the name of a function: it
# would be in that one's place.
_WHERE = {
    "Generated": "outcome",
    "ProbeReport": "probing",
    "generate": "public",
    "memoize": "memoizing",
    "probe": "public",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'fastpipe.generation' has no attribute {name!r}")
    load_rich()
    value = getattr(load_part(f"{__name__}.{_WHERE[name]}"), name)
    globals()[name] = value
    return value
