"""The child process of a peer: ``python …/benchmarks/peers/child.py KEY``, with the peer's interpreter.

It is run by its path, for that interpreter may belong to an environment without fastpipe and
without what fastpipe needs.  It takes only ``fastpipe.bench.samples`` from fastpipe, which needs NumPy.
"""

from __future__ import annotations

import sys
import types
from pathlib import Path


def _bare_packages() -> None:
    """Let ``fastpipe.bench.samples`` be imported without running fastpipe's own modules."""
    here = Path(__file__).resolve().parent
    root = here.parents[1]
    # Run by path, a script's folder comes first; this one's files must not hide other packages.
    sys.path[:] = [entry for entry in sys.path if not entry or Path(entry).resolve() != here]
    sys.path.append(str(root))
    for name in ("fastpipe", "fastpipe.bench"):
        package = types.ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")))]
        sys.modules[name] = package


if not __package__:
    _bare_packages()

from benchmarks.peers.children.serve import main  # noqa: E402 (after the packages are there)

if __name__ == "__main__":
    main()
