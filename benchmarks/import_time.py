"""Measure the time that ``import fastpipe`` adds to ``import numpy``; it should be at most 0.15 s.

::

    python benchmarks/import_time.py --rounds 15

Each measurement is a new interpreter that times its own import statement, so that starting
Python does not count.  The two kinds alternate, so that a busy neighbour meets both.
"""

from __future__ import annotations

import statistics
import subprocess
import sys

from rounds import rounds_asked

_BUDGET_S = 0.15
_IMPORTS = {"numpy": "import numpy", "numpy and fastpipe": "import numpy, fastpipe"}


def measure(rounds: int) -> dict[str, list[float]]:
    """Import in new interpreters, the kinds in turn.

    Args:
        rounds: measurements of each kind that count; one more of each warms the file cache.

    Returns:
        For each kind its durations in seconds, one a round; durations of one round were
        measured one after the other.
    """
    seconds: dict[str, list[float]] = {kind: [] for kind in _IMPORTS}
    for number in range(rounds + 1):
        kinds = list(_IMPORTS) if number % 2 else list(reversed(_IMPORTS))
        for kind in kinds:
            taken = _import_once(_IMPORTS[kind])
            if number:
                seconds[kind].append(taken)
    return seconds


def _import_once(statement: str) -> float:
    code = f"from time import perf_counter as now; t = now(); {statement}; print(now() - t)"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout)


def main() -> None:
    """Print the medians, their ranges, and what fastpipe adds."""
    rounds = rounds_asked(__doc__, 15, "each kind")
    seconds = measure(rounds)
    for kind, values in seconds.items():
        print(f"import {kind:20} {_text(values)}")
    added = [b - a for a, b in zip(*seconds.values(), strict=True)]
    verdict = "within" if statistics.median(added) <= _BUDGET_S else "ABOVE"
    print(f"fastpipe adds{'':14}{_text(added)}: {verdict} the budget of {_BUDGET_S * 1000:.0f} ms")


def _text(seconds: list[float]) -> str:
    ms = [1000 * value for value in seconds]
    return f"{statistics.median(ms):6.1f} ms (median of {len(ms)}; {min(ms):.1f} to {max(ms):.1f})"


if __name__ == "__main__":
    main()
