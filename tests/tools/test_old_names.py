"""``fastpipe.profiling``, the former name of ``fastpipe.tools``."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import fastpipe
from fastpipe import tools


def test_the_old_module_has_the_new_one_s_names_and_warns() -> None:
    old = importlib.import_module("fastpipe.profiling")
    assert set(old.__all__) == set(tools.__all__) - {"BatchSizes", "Tuning"}
    for name in old.__all__:
        with pytest.warns(DeprecationWarning, match=f"is now fastpipe.tools.{name}"):
            assert getattr(old, name) is getattr(tools, name)
    with pytest.warns(DeprecationWarning):
        assert fastpipe.profiling.watch is fastpipe.watch
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        old.nothing


def test_an_import_from_it_works_and_its_own_import_is_quiet() -> None:
    code = (
        "import fastpipe.profiling; print(1); from fastpipe.profiling import Report; print(Report.__module__)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "always", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["1", "fastpipe.tools.report"]
    assert done.stderr.count("DeprecationWarning") >= 1 and "fastpipe.tools.Report" in done.stderr
