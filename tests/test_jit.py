"""Kernels on disk: found again, and only while the code of all kernels is the same."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest

import fastpipe
from fastpipe import _jit

_PACKAGE = Path(fastpipe.__file__).parent
_SIGNATURE = numba.types.int64(numba.types.int64)


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """Imports a module with a function, as a new process would, and compiles that."""
    (tmp_path / "some_kernels.py").write_text("def double(x):\n    return 2 * x\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def load() -> Any:
        monkeypatch.delitem(sys.modules, "some_kernels", raising=False)
        module = importlib.import_module("some_kernels")
        return _jit.compiled(_SIGNATURE)(module.double)

    return load


def _hits(kernel: Any) -> int:
    assert kernel(21) == 42
    return sum(kernel.stats.cache_hits.values())


def test_a_kernel_is_found_again(kernel: Callable[[], Any]) -> None:
    assert [_hits(kernel()) for _ in range(3)] == [0, 1, 1]


@pytest.mark.parametrize("before_a_terminal", [True, False])
def test_it_is_told_once_that_kernels_are_compiled(
    kernel: Callable[[], Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    before_a_terminal: bool,
) -> None:
    monkeypatch.setattr(_jit, "_is_compiling", False)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: before_a_terminal)
    made = kernel(), kernel()
    assert [_hits(one) for one in made] == [0, 1]
    assert capsys.readouterr().err.count("compiles its kernels") == before_a_terminal
    monkeypatch.setattr(_jit, "_is_compiling", False)
    kernel()
    assert "compiles" not in capsys.readouterr().err


def test_a_change_of_any_kernel_s_source_compiles_all_anew(
    kernel: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel()
    with monkeypatch.context() as patch:
        patch.setattr(_jit, "_sources_digest", lambda: "of the next version")
        assert [_hits(kernel()) for _ in range(2)] == [0, 1]
    assert _hits(kernel()) == 1, "both versions are kept"


def test_the_digest_is_of_every_module_with_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    words = ("import compiled", "extending", "def compiled")
    found = {
        str(path.relative_to(_PACKAGE))
        for path in _PACKAGE.rglob("*.py")
        if any(word in path.read_text() for word in words)
    }
    assert found == set(_jit.KERNEL_MODULES)
    digest = _jit._sources_digest.__wrapped__
    for name in _jit.KERNEL_MODULES:
        copy = tmp_path / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes((_PACKAGE / name).read_bytes())
    monkeypatch.setattr(_jit, "__file__", str(tmp_path / "_jit.py"))
    assert digest() == _jit._sources_digest()
    for name in _jit.KERNEL_MODULES:
        before = digest()
        (tmp_path / name).write_bytes((_PACKAGE / name).read_bytes() + b"\n")
        assert digest() != before


def test_only_the_types_that_were_asked_for(kernel: Callable[[], Any]) -> None:
    made = kernel()
    with pytest.raises(TypeError, match="No matching definition"):
        made(np.zeros(3))


def test_without_a_folder_to_write_it_is_compiled_and_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_jit, "_has_said", False)
    names: dict[str, Any] = {}
    exec("def double(x):\n    return 2 * x\n", names)  # of no file, so that numba has no place for it
    with caplog.at_level(logging.WARNING, "fastpipe"):
        for _ in range(2):
            assert _jit.compiled(_SIGNATURE)(names["double"])(21) == 42
    assert len(caplog.records) == 1
    assert "set NUMBA_CACHE_DIR" in caplog.text
