"""Print how large the package is, and how its modules hang together: ``python benchmarks/house.py [TREE]``.

TREE is a checkout; by default it is this one.
"""

from __future__ import annotations

import argparse
import ast
import statistics
from collections.abc import Iterator
from pathlib import Path


class Module:
    """One module of the package: its lines, and the modules that it imports anywhere."""

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name = path, name
        self.text = path.read_text(encoding="utf-8")
        self.tree = ast.parse(self.text)
        self.lines = self.text.count("\n")

    @property
    def folder(self) -> str:
        """The package that the module is in."""
        return self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]

    def imports(self, names: set[str], *, at_start: bool = False) -> set[str]:
        """Return the package's modules that it imports; with ``at_start`` those that its own import loads."""
        found: set[str] = set()
        for node in _at_start(self.tree.body) if at_start else ast.walk(self.tree):
            if isinstance(node, ast.Import):
                found.update(one.name for one in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                for one in node.names:
                    inner = f"{node.module}.{one.name}"
                    found.add(inner if inner in names else node.module)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and not at_start:
                found.add(node.value)  # a part that is loaded by its name
        return (found & names) - {self.name}

    def parameters(self) -> Iterator[tuple[int, str]]:
        """Yield for each function its number of parameters and its name."""
        for node in ast.walk(self.tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                its = node.args
                count = len(its.posonlyargs) + len(its.args) + len(its.kwonlyargs)
                yield count, f"{self.name.removeprefix('fastpipe.')}.{node.name}"


def _at_start(statements: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements that run on import, blocks for type checkers left out."""
    for one in statements:
        if isinstance(one, ast.If) and "TYPE_CHECKING" in ast.dump(one.test):
            continue
        yield one
        for block in ("body", "orelse", "handlers", "finalbody"):
            if isinstance(one, (ast.If, ast.Try, ast.With)):
                yield from _at_start(getattr(one, block, []))


def modules_of(tree: Path) -> dict[str, Module]:
    """Return the package's modules by their dotted names."""
    found = {}
    for path in sorted((tree / "fastpipe").rglob("*.py")):
        name = ".".join(path.relative_to(tree).with_suffix("").parts).removesuffix(".__init__")
        found[name] = Module(path, name)
    return found


def circles(modules: dict[str, Module]) -> list[list[str]]:
    """Return the groups of modules that import each other when they are imported (Tarjan, 1972)."""
    names = set(modules)
    edges = {name: module.imports(names, at_start=True) for name, module in modules.items()}
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        number[name] = lowest[name] = len(number)
        stack.append(name)
        for other in edges[name]:
            if other not in number:
                visit(other)
            if other in stack:
                lowest[name] = min(lowest[name], lowest[other])
        if lowest[name] == number[name]:
            circle = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(circle) > 1:
                found.append(sorted(circle))

    for name in modules:
        if name not in number:
            visit(name)
    return found


def single_importers(modules: dict[str, Module]) -> list[str]:
    """Return the modules that one module imports, which is in the same folder."""
    names = set(modules)
    importers: dict[str, set[str]] = {name: set() for name in names}
    for name, module in modules.items():
        for other in module.imports(names):
            importers[other].add(name)
    return [
        name
        for name, who in importers.items()
        if len(who) == 1 and modules[next(iter(who))].folder == modules[name].folder
    ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Print how large fastpipe is.", allow_abbrev=False)
    parser.add_argument("tree", nargs="?", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("--modules", action="store_true", help="print every module and what it is about")
    args = parser.parse_args()
    modules = modules_of(args.tree)
    if args.modules:
        for module in modules.values():
            about = (ast.get_docstring(module.tree) or "").partition("\n\n")[0]
            print(f"{module.path.relative_to(args.tree)}\n    {' '.join(about.split())}")
        return
    folders: dict[str, list[Module]] = {}
    for name, module in modules.items():
        inner = name.split(".")[1:]
        is_package = module.path.name == "__init__.py" or len(inner) > 1
        folders.setdefault(inner[0] if inner and is_package else "(top)", []).append(module)
    lines = sorted(module.lines for module in modules.values() if module.lines > 1)
    print(f"{'folder':12} {'lines':>7} {'modules':>8}")
    for folder, its in sorted(folders.items(), key=lambda pair: -sum(one.lines for one in pair[1])):
        print(f"{folder:12} {sum(one.lines for one in its):>7,} {len(its):>8}")
    print(f"{'all':12} {sum(lines):>7,} {len(modules):>8}")
    single = single_importers(modules)
    print(f"\nmedian lines of a module   {statistics.median(lines):.0f}")
    print(f"modules with one importer, in the same folder   {len(single)}")
    print(f"circles of modules   {len(circles(modules))}")
    most = sorted((pair for module in modules.values() for pair in module.parameters()), reverse=True)
    print("functions with more than 12 parameters")
    for count, name in most:
        if count > 12:
            print(f"  {count}  {name}")


if __name__ == "__main__":
    main()
