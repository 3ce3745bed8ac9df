"""Import rules: see ARCHITECTURE.md."""

from __future__ import annotations

import ast
import functools
import graphlib
import sys
from collections.abc import Iterable, Iterator
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
    "pillow": _EVERYWHERE | {"images"},
    "native": set(),
    "core": _EVERYWHERE | {"native"},
    "images": _EVERYWHERE,
    "stores": _EVERYWHERE,
    "hdf5": _EVERYWHERE | {"stores", "console"},
    "volumes": _EVERYWHERE | {"stores", "hdf5", "sampling", "console"},
    "augment": _EVERYWHERE | {"images"},  # containers of transforms are taken apart in one place
    "torch": _EVERYWHERE | _DATA | {"pillow"},
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
    "torch/workers.py": {"pillow"},
}
# What commands show of files; only they load these.
_SHOWING = {"hdf5/inspect.py", "hdf5/repack.py", "volumes/inspection.py", "volumes/repack.py"}
_LOWER = {"", "core", "errors", "hdf5", "images", "native", "options", "sampling", "stores", "volumes"}


def _name(path: Path) -> str:
    return path.relative_to(_PACKAGE).as_posix()


def _layer(path: Path) -> str:
    parts = path.relative_to(_PACKAGE).with_suffix("").parts
    if parts[-1] == "__main__":  # the command line, wherever it stands
        return "__main__"
    return "" if parts == ("__init__",) else parts[0]


def _imports(tree: ast.AST) -> Iterator[tuple[ast.stmt, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module is not None, "imports are absolute"
            if node.module != "fastpipe":
                yield node, node.module
                continue
            for alias in node.names:  # "from fastpipe import X" names a module, or a public name
                yield node, f"fastpipe.{alias.name}" if alias.name in _MAY_IMPORT else "fastpipe"


def _own(imports: Iterable[tuple[ast.stmt, str]]) -> Iterator[tuple[ast.stmt, str]]:
    """Those of this package, by their names within it."""
    for statement, name in imports:
        package, _, module = name.partition(".")
        if package == "fastpipe":
            yield statement, module


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


@pytest.mark.parametrize("path", _MODULES, ids=_name)
def test_a_module_imports_only_what_its_layer_may(path: Path) -> None:
    tree, layer = _tree(path), _layer(path)
    assert layer in _MAY_IMPORT, f"a new folder: say in ARCHITECTURE.md and here what {layer!r} may import"
    typing_only = _type_checking_only(tree)
    for statement, module in _own(_imports(tree)):
        is_allowed = module.split(".")[0] in _MAY_IMPORT[layer] | {layer}
        assert statement in typing_only or is_allowed, f"{layer or 'fastpipe'} may not import {module}"


@pytest.mark.parametrize("path", _MODULES, ids=_name)
def test_a_module_is_imported_at_the_top_and_never_by_a_string(path: Path) -> None:
    tree = _tree(path)
    tries = [part for part in tree.body if isinstance(part, ast.Try)]
    at_top = {*tree.body, *(part for one in tries for part in one.body), *_type_checking_only(tree)}
    for statement, module in _own(_imports(tree)):
        if module not in _LAZY.get(_name(path), set()):
            assert statement in at_top, f"line {statement.lineno}: import {module} at the top of the module"
    for node in ast.walk(tree):
        imports = ("import_module", "__import__", "require")
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(imports):
            for name in (one.value for one in node.args if isinstance(one, ast.Constant)):
                assert not str(name).startswith("fastpipe"), f"line {node.lineno}: import {name} at the top"


@pytest.mark.parametrize("path", [path for path in _MODULES if _layer(path) in _LOWER], ids=_name)
def test_lower_layers_load_only_numpy_and_the_standard_library(path: Path) -> None:
    tree = _tree(path)
    at_import = set(_run_by_importing(tree))
    light = {*sys.stdlib_module_names, "numpy", "fastpipe", *(["rich"] if _name(path) in _SHOWING else [])}
    for statement, name in _imports(tree):
        is_light = statement not in at_import or name.split(".")[0] in light
        assert is_light, f"line {statement.lineno}: load {name} through _extras.require"


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


_BY_PUBLIC_NAMES = [
    one for one in _MODULES if _layer(one) == "bench" or one.name in ("verify.py", "comparison.py")
]


@pytest.mark.parametrize("path", _BY_PUBLIC_NAMES, ids=_name)
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
        name = ".".join(path.relative_to(_PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        tree, found = _tree(path), graph.setdefault(name, set())
        skip = set() if with_types else _type_checking_only(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Import) and node not in skip:
                found |= {one.name for one in node.names if one.name.split(".")[0] == "fastpipe"}
            elif isinstance(node, ast.ImportFrom) and node not in skip:
                module = node.module or ""
                if module.split(".")[0] == "fastpipe":
                    targets = {f"{module}.{alias.name}" for alias in node.names}
                    found |= {target if _is_module(target) else module for target in targets}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"import circle: {' → '.join(error.args[1])}")


def _is_module(name: str) -> bool:
    path = _PACKAGE.parent.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or path.is_dir()


def test_no_public_name_is_the_name_of_a_folder() -> None:
    folders = {path.name for path in _PACKAGE.iterdir() if path.is_dir()}
    assert not folders & set(fastpipe.__all__)
