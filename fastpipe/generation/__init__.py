"""Make samples with a function on all cores and store each once; keep the results of functions.

``run`` has ``generate`` and ``probe``, ``memoized`` has ``memoize``.  ARCHITECTURE.md has the map.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastpipe.core.extras import load_part, load_rich

if TYPE_CHECKING:
    from fastpipe.generation.estimate import ProbeReport
    from fastpipe.generation.memoized import memoize
    from fastpipe.generation.run import Generated, generate, probe

__all__ = ["Generated", "ProbeReport", "generate", "memoize", "probe"]

# Loaded when first used: a worker that starts loads none of them.  No module has the name of a function: it
# would be in that one's place.
_WHERE = {
    "Generated": "run",
    "ProbeReport": "estimate",
    "generate": "run",
    "memoize": "memoized",
    "probe": "run",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'fastpipe.generation' has no attribute {name!r}")
    load_rich()
    value = getattr(load_part(f"{__name__}.{_WHERE[name]}"), name)
    globals()[name] = value
    return value
