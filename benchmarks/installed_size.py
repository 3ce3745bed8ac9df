"""Measure the size of ``pip install '.[all]'`` without torch, TensorFlow and their own dependencies.

::

    python benchmarks/installed_size.py [--extra all] [--pyproject pyproject.toml]

Run it with a Python (3.11 or later) that has the packages: nothing is downloaded, and versions are the
installed ones.  Requirements are followed from the extra of ``pyproject.toml``, with this Python's markers
and the extras that each asks for; those of the frameworks are not.  So what only they bring (NVIDIA's
libraries, triton) is left out, and what something else needs as well (NumPy) is not.  A distribution's size
is the sum of its files on disk, those of its ``RECORD``, in MB of 10**6 bytes, without compiled Python, which
pip writes and uv does not.  fastpipe itself is not counted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import tomllib
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

_FRAMEWORKS = {"torch", "torchvision", "tensorflow", "tensorflow-cpu"}


def required(pyproject: Path, extra: str) -> list[Requirement]:
    """Return what fastpipe needs with an extra, with the extras that this one names followed."""
    project = tomllib.loads(pyproject.read_text())["project"]
    found = [Requirement(text) for text in project["dependencies"]]
    names = [extra]
    for name in names:  # grows
        for one in map(Requirement, project["optional-dependencies"][name]):
            if one.name == "fastpipe":
                names += sorted(one.extras - set(names))
            else:
                found.append(one)
    return found


def installed(requirements: Iterable[Requirement]) -> tuple[dict[str, Distribution], set[str]]:
    """Return the distributions that these need, by name, and those that are not installed."""
    found: dict[str, Distribution] = {}
    missing: set[str] = set()
    seen: set[tuple[str, str]] = set()
    waiting = [(one, "") for one in requirements]
    while waiting:
        one, of_extra = waiting.pop()
        name = canonicalize_name(one.name)
        if name in _FRAMEWORKS or (one.marker is not None and not one.marker.evaluate({"extra": of_extra})):
            continue
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:
            missing.add(name)
            continue
        for extra in {"", *one.extras} - {known for of, known in seen if of == name}:
            seen.add((name, extra))
            waiting += [(Requirement(text), extra) for text in found[name].requires or ()]
    return found, missing


def megabytes(one: Distribution) -> float:
    """Return the size of a distribution's files."""
    paths = [Path(str(file.locate())) for file in one.files or () if file.suffix != ".pyc"]
    return sum(path.stat().st_size for path in paths if path.is_file()) / 1e6


def main() -> int:
    """Print the table, and return 1 if something is not installed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--extra", default="all", help="of fastpipe (default: all)")
    own = Path(__file__).parents[1] / "pyproject.toml"
    parser.add_argument("--pyproject", type=Path, default=own, help="of which version (default: this one)")
    args = parser.parse_args()
    found, missing = installed(required(args.pyproject, args.extra))
    sizes = sorted(((megabytes(one), name, one.version) for name, one in found.items()), reverse=True)
    print("| distribution | version | MB |\n|---|---|--:|")
    for size, name, version in sizes:
        print(f"| {name} | {version} | {size:.1f} |")
    print(f"| **{len(sizes)} distributions** | | **{sum(size for size, *_ in sizes):.1f}** |")
    if missing:
        print(f"not installed: {', '.join(sorted(missing))}", file=sys.stderr)
    return bool(missing)


if __name__ == "__main__":
    sys.exit(main())
