"""Who may import whom: see ARCHITECTURE.md."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fastpipe
from fastpipe import generation

_PACKAGE = Path(fastpipe.__file__).parent
_MODULES = sorted(_PACKAGE.rglob("*.py"))

_BASE = {
    "_files",
    "errors",
    "options",
    "types",
    "protocols",
    "_extras",
    "_sizes",
    "_natural",
    "_processes",
    "_machine",
    "_epochs",
    "_nvtx",
    "_casting",
    "_printable",
}
_STORED = _BASE | {"_private_folder"}
_MIDDLE = {"index", "stores", "engine", "cache", "hdf5"}
_MAY_IMPORT: dict[str, set[str]] = {
    "": {"_extras", "errors", "options", "sampling"},
    "errors": {"_printable"},
    "_printable": set(),
    "options": {"errors"},
    "types": set(),
    "sampling": {"errors"},
    "protocols": {"types"},
    "_extras": {"errors"},
    "_sizes": set(),
    "console": {"_sizes", "_printable"},
    "_natural": set(),
    "_processes": set(),
    "_machine": set(),
    "_epochs": {"errors"},
    "_nvtx": set(),
    "_casting": set(),
    "_files": set(),
    "_private_folder": {"errors", "_files"},
    **{layer: _BASE | {layer} for layer in _MIDDLE},
    "native": set(),
    "core": _BASE | {"native", "engine", "core"},
    "images": _BASE | {"core", "engine", "index", "cache", "images"},
    "index": _STORED | {"index"},
    "stores": _STORED | {"index", "cache", "stores"},
    "cache": _STORED | {"core", "cache"},
    "device": _BASE | {"device", "images"},
    "augment": _BASE | {"engine", "core", "images", "augment"},
    "_beside": set(),
    "arrays": _BASE | _MIDDLE | {"core", "sampling", "arrays"},
    "hdf5": _BASE | {"console", "core", "engine", "cache", "index", "stores", "arrays", "sampling", "hdf5"},
    "volumes": _STORED | _MIDDLE | {"console", "core", "hdf5", "sampling", "arrays", "volumes"},
    "torch": _BASE
    | _MIDDLE
    | {
        "hdf5",
        "volumes",
        "_beside",
        "sampling",
        "arrays",
        "core",
        "images",
        "device",
        "augment",
        "torch",
    },
    "tf": _BASE
    | _MIDDLE
    | {"_beside", "augment", "core", "images", "sampling", "arrays", "hdf5", "volumes", "tf"},
    "bench": {
        "_private_folder",
        "console",
        "errors",
        "_printable",
        "_extras",
        "_processes",
        "augment",
        "generation",
        "bench",
        "core",
        "images",
        "index",
        "hdf5",
        "volumes",
        "",
    },
    "generation": _STORED | {"console", "cache", "hdf5", "bench", "generation"},
    # The doctor measures with the library's own decoders, stores and limits, not with others like them.
    "tools": _STORED
    | {
        "_beside",
        "console",
        "core",
        "engine",
        "hdf5",
        "volumes",
        "images",
        "index",
        "stores",
        "cache",
        "bench",
        "tools",
        "",
    },
    "profiling": {"tools", ""},
    "cli": {"console", "errors", "_printable", "bench", "generation", "tools", ""},
    "__main__": {"cli"},
}
# Imported by a function of theirs, as it is paid by who uses it: stores,
# devices, arrays, caches, image folders; what only one command of the command line has.
_LAZY = {
    "cli.py": {"bench", "console"},
    "images/batch.py": {"cache"},
    "torch/batches.py": {"device"},
    "torch/describe.py": {"torch", "volumes"},
    "torch/folder_source.py": {"device", "torch"},
    "torch/image_folder.py": {"cache", "index", "torch"},
    "torch/loader.py": {"cache", "device", "torch"},
    "torch/runtime.py": {"arrays", "cache", "device", "images"},
    "torch/split.py": {"augment"},
}
# What commands show of files; only they load these.
_SHOWING = {"hdf5/inspect_report.py", "hdf5/repacking.py", "volumes/inspection.py", "volumes/repack.py"}
_LIGHT = {*sys.stdlib_module_names, "numpy", "fastpipe"}


def _layer(path: Path) -> str:
    parts = path.relative_to(_PACKAGE).with_suffix("").parts
    if parts[-1] == "__main__":  # the command line, wherever it stands
        return "__main__"
    return "" if parts == ("__init__",) else parts[0]


def _imported_layer(name: str) -> str:
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else ""


def _imports(tree: ast.AST) -> list[tuple[ast.stmt, str]]:
    found: list[tuple[ast.stmt, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            # "from fastpipe.index import folder" names a module, "from fastpipe import X" a name.
            if node.module == "fastpipe":
                names = [alias.name for alias in node.names]
                found += [(node, f"fastpipe.{name}" if name in _MAY_IMPORT else "fastpipe") for name in names]
            else:
                found.append((node, node.module))
    return found


def _type_checking_only(tree: ast.Module) -> set[ast.stmt]:
    return {
        statement
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for statement in node.body
    }


@pytest.mark.parametrize("path", _MODULES, ids=lambda path: str(path.relative_to(_PACKAGE)))
def test_a_module_imports_only_what_its_layer_may(path: Path) -> None:
    tree = ast.parse(path.read_text())
    layer = _layer(path)
    assert layer in _MAY_IMPORT, f"a new folder: say in ARCHITECTURE.md and here what {layer!r} may import"
    for statement, name in _imports(tree):
        if name.split(".")[0] != "fastpipe" or statement in _type_checking_only(tree):
            continue
        assert _imported_layer(name) in _MAY_IMPORT[layer], f"{layer or 'fastpipe'} may not import {name}"


@pytest.mark.parametrize("path", _MODULES, ids=lambda path: str(path.relative_to(_PACKAGE)))
def test_no_function_imports_within_the_package(path: Path) -> None:
    tree = ast.parse(path.read_text())
    tries = [part for part in tree.body if isinstance(part, ast.Try)]
    at_top = {*tree.body, *(part for one in tries for part in one.body), *_type_checking_only(tree)}
    lazy = _LAZY.get(path.relative_to(_PACKAGE).as_posix(), set())
    for statement, name in _imports(tree):
        if name.split(".")[0] == "fastpipe" and _imported_layer(name) not in lazy:
            assert statement in at_top, f"line {statement.lineno}: import {name} at the top of the module"


@pytest.mark.parametrize("path", _MODULES, ids=lambda path: str(path.relative_to(_PACKAGE)))
def test_no_module_is_imported_by_a_string(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
            ("import_module", "__import__", "require")
        ):
            for argument in node.args:
                name = argument.value if isinstance(argument, ast.Constant) else None
                assert not str(name).startswith("fastpipe"), f"line {node.lineno}: import {name} at the top"


@pytest.mark.parametrize(
    "path",
    [
        p
        for p in _MODULES
        if _layer(p) in _MIDDLE | _BASE | {"", "arrays", "core", "images", "native", "volumes"}
    ],
    ids=lambda path: str(path.relative_to(_PACKAGE)),
)
def test_lower_layers_load_only_numpy_and_the_standard_library(path: Path) -> None:
    tree = ast.parse(path.read_text())
    at_import = set(_run_by_importing(tree))
    shows = path.relative_to(_PACKAGE).as_posix() in _SHOWING
    for statement, name in _imports(tree):
        if statement in at_import:
            light = name.split(".")[0] in _LIGHT or (shows and name.split(".")[0] == "rich")
            assert light, f"line {statement.lineno}: load {name} through _extras.require"


def _run_by_importing(tree: ast.Module) -> Iterator[ast.AST]:
    """All nodes that run when the module is imported: those in try, if and class too."""
    typing_only = _type_checking_only(tree)
    todo: list[ast.AST] = [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) or node in typing_only:
            continue
        yield node
        todo += ast.iter_child_nodes(node)


@pytest.mark.parametrize(
    "path",
    [p for p in _MODULES if _layer(p) == "bench" or p.name in ("verify.py", "comparison.py")],
    ids=lambda path: str(path.relative_to(_PACKAGE)),
)
def test_bench_and_verify_use_public_names(path: Path) -> None:
    public = {
        "fastpipe": {*fastpipe.__all__, "__version__", "augment", "bench"},
        "fastpipe.generation": {*generation.__all__},
    }
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module in public:
            private = {alias.name for alias in node.names} - public[node.module]
            assert not private, f"line {node.lineno}: {private} of {node.module} is not public"


@pytest.mark.parametrize(("folder", "with_types"), [(".", False), ("augment", True)], ids=["all", "augment"])
def test_modules_do_not_import_each_other_in_a_circle(folder: str, with_types: bool) -> None:
    """In some folders not for their types either."""
    graph: dict[str, set[str]] = {}
    for path in _MODULES:
        if not path.is_relative_to(_PACKAGE / folder) or (with_types and path.name == "__init__.py"):
            continue
        parts = path.relative_to(_PACKAGE.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        tree = ast.parse(path.read_text())
        skip = set() if with_types else _type_checking_only(tree)
        graph[name] = set()
        for node in ast.walk(tree):
            if node in skip:
                continue
            if isinstance(node, ast.Import):
                graph[name] |= {a.name for a in node.names if a.name.split(".")[0] == "fastpipe"}
            elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "fastpipe":
                targets = {f"{node.module}.{alias.name}" for alias in node.names}
                graph[name] |= {t if _is_module(t) else node.module or "" for t in targets}
    order: list[str] = []

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"import circle: {' → '.join((*path, name))}"
        if name not in order:
            for target in graph.get(name, ()):
                visit(target, (*path, name))
            order.append(name)

    for name in graph:
        visit(name, ())


def _is_module(name: str) -> bool:
    path = _PACKAGE.parent.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or path.is_dir()


def test_no_public_name_is_the_name_of_a_folder() -> None:
    folders = {path.name for path in _PACKAGE.iterdir() if path.is_dir()}
    assert not folders & set(fastpipe.__all__)


def test_modules_are_short() -> None:
    long = {str(p.relative_to(_PACKAGE)): n for p in _MODULES if (n := len(p.read_text().splitlines())) > 800}
    assert not long
