"""Make samples with a function on all cores, and store the results of functions (``memoize``).

``generate`` and ``probe`` are in the module ``run``.  ``memoize`` is in the module ``memoized``.  See
ARCHITECTURE.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastpipe.core.extras import load_part, load_rich

if TYPE_CHECKING:
    from fastpipe.generation.estimate import ProbeReport
    from fastpipe.generation.memoized import memoize
    from fastpipe.generation.run import Generated, generate, probe

__all__ = ["Generated", "ProbeReport", "generate", "memoize", "probe"]

# These modules are imported on first use, so that a starting worker process imports none of them.  No module
# may have the name of a function, because importing the module would replace the function.
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
