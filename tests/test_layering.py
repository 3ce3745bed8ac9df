"""Import rules: see ARCHITECTURE.md."""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fastpipe
from fastpipe import generation

_PACKAGE = Path(fastpipe.__file__).parent
_MODULES = sorted(_PACKAGE.rglob("*.py"))

# The folder of a module, or its name where it lies at the top level, and what it may import beside its own folder.
_EVERYWHERE = {"errors", "options", "core"}
_DATA = {"images", "hdf5", "volumes", "stores", "augment", "sampling"}
_MAY_IMPORT: dict[str, set[str]] = {
    "": {"core", "errors", "options", "sampling"},
    "errors": {"core"},  # names in messages are made printable
    "options": {"errors"},
    "sampling": {"errors"},
    "console": {"core"},
    "native": set(),
    "core": _EVERYWHERE | {"native"},
    "images": _EVERYWHERE,
    "stores": _EVERYWHERE,
    "hdf5": _EVERYWHERE | {"stores", "console"},
    "volumes": _EVERYWHERE | {"stores", "hdf5", "sampling", "console"},
    "augment": _EVERYWHERE | {"images"},  # containers of transforms are taken apart in one place
    "torch": _EVERYWHERE | _DATA,
    "tf": _EVERYWHERE | _DATA,
    "generation": _EVERYWHERE | {"console"},
    "bench": _EVERYWHERE | {"", "console", "augment", "generation"},
    "tools": _EVERYWHERE | {"", "console", "bench", "images", "hdf5", "stores"},
    "profiling": {"tools"},
    "cli": _EVERYWHERE | {"", "console", "bench", "generation", "tools"},
    "__main__": {"cli"},
}
# Modules that a function imports, so that only scripts that use them load them.
_LAZY = {
    "cli.py": {"console"},
    "images/batch.py": {"core.file_identity"},
    "tf/arrays.py": {"hdf5.samples", "volumes.samples", "volumes.sources"},
    "torch/batches.py": {"core.transfer"},
    "torch/describe.py": {"torch.image_folder", "volumes.places"},
    "torch/folder_source.py": {"core.transfer", "torch.staging"},
    "torch/image_folder.py": {"core.caches", "torch.staging"},
    "torch/loader.py": {"torch.array_dataset", "torch.folder_source"},
    "torch/runtime.py": {"images.cache", "images.dali", "images.gpu_batches", "images.gpu_share"},
    "torch/split.py": {"augment", "augment.chains"},
}
# What commands show of files; only they load these.
_SHOWING = {"hdf5/inspect.py", "hdf5/repack.py", "volumes/inspection.py", "volumes/repack.py"}
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
            # "from fastpipe.core import folder" names a module, "from fastpipe import X" a name.
            if node.module == "fastpipe":
                names = [alias.name for alias in node.names]
                found += [(node, f"fastpipe.{name}" if name in _MAY_IMPORT else "fastpipe") for name in names]
            else:
                found.append((node, node.module))
    return found


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _type_checking_only(tree: ast.Module) -> set[ast.stmt]:
    return {
        statement
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for statement in node.body
    }


@pytest.mark.parametrize("path", _MODULES, ids=lambda path: str(path.relative_to(_PACKAGE)))
def test_a_module_imports_only_what_its_layer_may(path: Path) -> None:
    tree = _tree(path)
    layer = _layer(path)
    assert layer in _MAY_IMPORT, f"a new folder: say in ARCHITECTURE.md and here what {layer!r} may import"
    typing_only = _type_checking_only(tree)
    for statement, name in _imports(tree):
        if name.split(".")[0] != "fastpipe" or statement in typing_only:
            continue
        assert _imported_layer(name) in _MAY_IMPORT[layer] | {layer}, (
            f"{layer or 'fastpipe'} may not import {name}"
        )


@pytest.mark.parametrize("path", _MODULES, ids=lambda path: str(path.relative_to(_PACKAGE)))
def test_no_function_imports_within_the_package(path: Path) -> None:
    tree = _tree(path)
    tries = [part for part in tree.body if isinstance(part, ast.Try)]
    at_top = {*tree.body, *(part for one in tries for part in one.body), *_type_checking_only(tree)}
    lazy = _LAZY.get(path.relative_to(_PACKAGE).as_posix(), set())
    for statement, name in _imports(tree):
        if name.split(".")[0] == "fastpipe" and name.removeprefix("fastpipe.") not in lazy:
            assert statement in at_top, f"line {statement.lineno}: import {name} at the top of the module"


@pytest.mark.parametrize("path", _MODULES, ids=lambda path: str(path.relative_to(_PACKAGE)))
def test_no_module_is_imported_by_a_string(path: Path) -> None:
    for node in ast.walk(_tree(path)):
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
        if _layer(p)
        in {"", "core", "errors", "hdf5", "images", "native", "options", "sampling", "stores", "volumes"}
    ],
    ids=lambda path: str(path.relative_to(_PACKAGE)),
)
def test_lower_layers_load_only_numpy_and_the_standard_library(path: Path) -> None:
    tree = _tree(path)
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
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.ImportFrom) and node.module in public:
            private = {alias.name for alias in node.names} - public[node.module]
            assert not private, f"line {node.lineno}: {private} of {node.module} is not public"


@pytest.mark.parametrize(
    ("folder", "with_types"),
    [(".", False), ("augment", True), ("torch", True)],
    ids=["all", "augment", "torch"],
)
def test_modules_do_not_import_each_other_in_a_circle(folder: str, with_types: bool) -> None:
    """In some folders not for their types either."""
    graph: dict[str, set[str]] = {}
    for path in _MODULES:
        if not path.is_relative_to(_PACKAGE / folder) or (with_types and path.name == "__init__.py"):
            continue
        parts = path.relative_to(_PACKAGE.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        tree = _tree(path)
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
