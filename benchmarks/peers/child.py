"""The child process of a peer: ``python …/benchmarks/peers/child.py KEY``, with the peer's interpreter.

It is run by its path, for that interpreter may belong to an environment without fastpipe and
without what fastpipe needs.  All that it takes from fastpipe is the folder `peer_children`,
which needs numpy and the peer.
"""

from __future__ import annotations

import sys
import types
from pathlib import Path

from benchmarks.peers.children.serve import main


def _bare_packages() -> None:
    """Let ``fastpipe.bench.peer_children`` be imported without running fastpipe's own modules."""
    here = Path(__file__).resolve().parent
    # Run by path, a script's folder comes first; this one's files must not hide other packages.
    sys.path[:] = [entry for entry in sys.path if not entry or Path(entry).resolve() != here]
    for name, folder in (("fastpipe", here.parent), ("fastpipe.bench", here)):
        package = types.ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules[name] = package


if not __package__:
    _bare_packages()


if __name__ == "__main__":
    main()
