"""The fixtures of all tests, tested in a run of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

_TESTS = Path(__file__).parent


def _run(pytester: pytest.Pytester, test: str) -> pytest.RunResult:
    conftest = re.sub("_PATIENCE_S = .*", "_PATIENCE_S = 0.1", (_TESTS / "conftest.py").read_text())
    markers = "\n    ".join(("leaks: x", "slow: x", "hang_after: x"))
    pytester.makeini(f"[pytest]\npythonpath = {_TESTS / 'support'}\nmarkers =\n    {markers}\n")
    pytester.makeconftest(conftest)
    pytester.makepyfile(test)
    return pytester.runpytest_subprocess("-p", "no:cacheprovider", "-rs")


@pytest.mark.slow
def test_what_a_test_leaves_behind_is_named(pytester: pytest.Pytester) -> None:
    result = _run(
        pytester,
        """
        import multiprocessing, os, subprocess, tempfile, threading
        import pytest

        kept = {}

        @pytest.fixture(scope="module", autouse=True)
        def clean():
            yield
            kept["process"].terminate()
            kept["process"].wait()
            os.unlink(kept["file"][1])

        def test_thread():
            threading.Thread(target=threading.Event().wait, daemon=True).start()

        def test_process():
            kept["process"] = subprocess.Popen(["sleep", "20"])

        def test_descriptor():
            kept["descriptor"] = open(__file__)

        def test_shared_memory():
            kept["semaphore"] = multiprocessing.get_context("spawn").Semaphore()

        def test_file():
            kept["file"] = tempfile.mkstemp(prefix="fastpipe-test-")
        """,
    )
    result.assert_outcomes(passed=5, errors=5)
    for kind in ("thread", "child process", "descriptor", "shared memory", "temporary file"):
        result.stdout.fnmatch_lines(["*left behind by this test:*", f"*  {kind}: *"])


def test_a_tidy_test_passes_and_shared_memory_of_another_program_is_not_blamed_on_it(
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
                import threading

                def test_it():
                    open({str(begin)!r}, "w").close()
                    open({str(begun)!r}).read()

                def test_a_thread():
                    thread = threading.Thread(target=lambda: None)
                    thread.start()
                    thread.join()
                """,
            )
            result.assert_outcomes(passed=2)
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


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine without an S3 server and without Ceph's programs."""
    monkeypatch.setenv("PATH", "")
    for name in ("FASTPIPE_REQUIRE_S3", "FASTPIPE_S3_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    ("required", "outcome", "line"),
    [("", "skipped", "*apt-get install radosgw*ENDPOINT*"), ("1", "errors", "*apt-get install radosgw*")],
    ids=["optional", "required"],
)  # fmt: skip
def test_without_a_server_tests_are_skipped_with_the_remedy_or_fail(
    required: str, outcome: str, line: str, pytester: pytest.Pytester, bare: pytest.MonkeyPatch
) -> None:
    bare.setenv("FASTPIPE_REQUIRE_S3", required)
    result = _run(pytester, "def test_it(s3): assert False")
    result.assert_outcomes(**{outcome: 1})
    result.stdout.fnmatch_lines([line])


@pytest.mark.slow
def test_a_server_may_be_named(pytester: pytest.Pytester, bare: pytest.MonkeyPatch) -> None:
    for name, value in (("FASTPIPE_S3_ENDPOINT", "http://127.0.0.1:9/"), ("AWS_ACCESS_KEY_ID", "me"),
                        ("AWS_SECRET_ACCESS_KEY", "hush")):  # fmt: skip
        bare.setenv(name, value)
    result = _run(
        pytester,
        """
        def test_options(s3):
            assert s3.options == {"key": "me", "secret": "hush", "endpoint_url": "http://127.0.0.1:9"}
            assert (s3.endpoint, s3.port, s3.pids) == ("http://127.0.0.1:9", 9, [])

        def test_stopping_it(s3):
            s3.stop_gateway(kill=True)
            assert False
        """,
    )
    result.assert_outcomes(passed=1, skipped=1)
    result.stdout.fnmatch_lines(["*cannot be stopped*unset $FASTPIPE_S3_ENDPOINT*"])
