"""The fixtures that watch every test, watched themselves."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

_CONFTEST = (Path(__file__).parent / "conftest.py").read_text()
_MARKERS = f"""
[pytest]
pythonpath = {Path(__file__).parent / "support"}
markers =
    leaks: x
    slow: x
    hang_after: x
"""


def _run(pytester: pytest.Pytester, test: str) -> pytest.RunResult:
    pytester.makeini(_MARKERS)
    pytester.makeconftest(re.sub("_PATIENCE_S = .*", "_PATIENCE_S = 0.1", _CONFTEST))
    pytester.makepyfile(test)
    return pytester.runpytest_subprocess("-p", "no:cacheprovider")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("thread", "threading.Thread(target=threading.Event().wait, daemon=True).start()"),
        ("child process", "globals()['kept'] = subprocess.Popen(['sleep', '20'])"),
        ("descriptor", "globals()['kept'] = open(__file__)"),
        ("shared memory", "globals()['kept'] = multiprocessing.get_context('spawn').Semaphore()"),
        ("temporary file", "globals()['kept'] = tempfile.mkstemp(prefix='fastpipe-test-')"),
    ],
)
def test_what_a_test_leaves_behind_is_named(pytester: pytest.Pytester, kind: str, body: str) -> None:
    result = _run(
        pytester,
        f"""
        import multiprocessing, os, subprocess, tempfile, threading
        import pytest

        @pytest.fixture(scope="module", autouse=True)
        def clean():
            yield
            kept = globals().get("kept")
            if hasattr(kept, "terminate"):
                kept.terminate()
                kept.wait()
            if isinstance(kept, tuple):
                os.unlink(kept[1])

        def test_it():
            {body}
        """,
    )
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*left behind by this test:*", f"*{kind}: *"])


def test_a_tidy_test_passes(pytester: pytest.Pytester) -> None:
    result = _run(
        pytester,
        """
        import threading

        def test_it():
            thread = threading.Thread(target=lambda: None)
            thread.start()
            thread.join()
        """,
    )
    result.assert_outcomes(passed=1)


def test_shared_memory_of_another_program_is_not_blamed_on_a_test(
    pytester: pytest.Pytester, tmp_path: Path
) -> None:
    begin, begun = tmp_path / "begin", tmp_path / "begun"
    os.mkfifo(begin)
    os.mkfifo(begun)
    code = f"""
import multiprocessing, sys
open({str(begin)!r}).read()
kept = multiprocessing.get_context("spawn").Semaphore()
open({str(begun)!r}, "w").close()
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, start_new_session=True
    ) as other:
        try:
            result = _run(
                pytester,
                f"""
                def test_it():
                    open({str(begin)!r}, "w").close()
                    open({str(begun)!r}).read()
                """,
            )
            result.assert_outcomes(passed=1)
            assert other.poll() is None
        except BaseException:
            other.kill()  # it waits for the inner run
            raise
        other.communicate()


@pytest.mark.slow
@pytest.mark.leaks("the inner run is ended before it can clean up")
def test_a_hang_ends_the_run_with_its_stack(pytester: pytest.Pytester) -> None:
    result = _run(
        pytester,
        """
        import threading
        import pytest

        @pytest.mark.hang_after(0.5)
        def test_it():
            threading.Event().wait()
        """,
    )
    assert result.ret != 0
    result.stderr.fnmatch_lines(["*Timeout*", "*test_it*"])
