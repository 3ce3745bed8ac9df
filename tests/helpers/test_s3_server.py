"""The S3 server of the tests: it keeps what it is given, and leaves nothing behind."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import s3_server
from s3_server import missing_programs

KEYS = ["a", "a/b", "A", "ü/ö.jpg", "with space", "100%25.jpg", "what?#x+y&z=1", "k" * 1000]


def _get(s3: Any, bucket: str, key: str, options: dict[str, Any] | None = None) -> bytes:
    import s3fs

    system = s3fs.S3FileSystem(**(options or s3.options), skip_instance_cache=True)
    return bytes(system.cat_file(f"{bucket}/{key}"))


def test_it_keeps_what_it_is_given(s3: Any) -> None:
    bucket = s3.bucket()
    for key in KEYS:
        s3.put(bucket, key, key.encode() * 3)
    assert sorted(s3.keys(bucket)) == sorted(KEYS)
    for key in KEYS:
        assert _get(s3, bucket, key) == key.encode() * 3
    s3.put(bucket, "a", b"anew")
    s3.delete(bucket, "A")
    assert _get(s3, bucket, "a") == b"anew"
    assert sorted(s3.keys(bucket)) == sorted({*KEYS} - {"A"})


def test_others_do_not_get_in(s3: Any) -> None:
    bucket = s3.bucket()
    s3.put(bucket, "x", b"1")
    with pytest.raises(PermissionError):
        _get(s3, bucket, "x", {**s3.options, "secret": "wrong"})
    with pytest.raises(PermissionError):
        _get(s3, bucket, "x", {"endpoint_url": s3.endpoint, "anon": True})


@pytest.fixture(scope="module")
def bucket(s3: Any) -> str:
    """Made while the gateway has not been killed: see ``S3Server.stop_gateway``."""
    name: str = s3.bucket()
    return name


@pytest.mark.parametrize("kill", [False, True])
def test_a_gateway_that_comes_back_has_what_it_had(kill: bool, s3: Any, bucket: str) -> None:
    s3.put(bucket, f"x-{kill}", b"1")
    s3.stop_gateway(kill=kill)
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(s3.endpoint, timeout=60)
    s3.start_gateway()
    assert _get(s3, bucket, f"x-{kill}") == b"1"
    s3.put(bucket, f"y-{kill}", b"2")
    assert {f"x-{kill}", f"y-{kill}"} <= {*s3.keys(bucket)}


def test_a_gateway_outlives_the_thread_that_starts_it(s3: Any, bucket: str) -> None:
    s3.stop_gateway()
    thread = threading.Thread(target=s3.start_gateway)
    thread.start()
    thread.join()
    while Path(f"/proc/self/task/{thread.native_id}").exists():  # whose end the kernel tells
        pass
    s3.put(bucket, "x", b"1")
    assert "x" in s3.keys(bucket)


_SUPPORT = str(Path(s3_server.__file__).parent)
_OWN = f"""
import sys
from pathlib import Path
sys.path.insert(0, {_SUPPORT!r})
from s3_server import S3Server
with S3Server(Path(sys.argv[1])) as server:
    print(*server.pids, flush=True)
    sys.stdin.readline()
"""


@pytest.mark.few(1)
@pytest.mark.parametrize("kill", [False, True])
def test_its_programs_end_with_it(kill: bool, s3: Any, tmp_path: Path) -> None:
    if not s3.pids:
        pytest.skip(f"{missing_programs()}: a server that is started here is needed")
    with subprocess.Popen(
        [sys.executable, "-c", _OWN, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as owner:
        assert owner.stdout is not None
        handles = [os.pidfd_open(int(pid)) for pid in owner.stdout.readline().split()]
        assert len(handles) == 3 and select.select(handles, [], [], 0)[0] == []
        if kill:
            owner.kill()
        else:
            owner.communicate(b"\n")
    left = set(handles)
    while left:  # ``hang_guard`` ends it
        left -= set(select.select(list(left), [], [])[0])
    for handle in handles:
        os.close(handle)


# The fixture itself, in a run of its own.

_CONFTEST = (Path(__file__).parents[1] / "conftest.py").read_text()


def _run(pytester: pytest.Pytester, test: str) -> pytest.RunResult:
    pytester.makeini(
        f"[pytest]\npythonpath = {_SUPPORT}\nmarkers =\n    leaks: x\n    slow: x\n    hang_after: x\n"
    )
    pytester.makeconftest(_CONFTEST)
    pytester.makepyfile(test)
    return pytester.runpytest_subprocess("-p", "no:cacheprovider", "-rs")


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine without a server and without Ceph's programs."""
    monkeypatch.setenv("PATH", "")
    for name in ("FASTPIPE_REQUIRE_S3", "FASTPIPE_S3_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_without_a_server_tests_are_skipped_with_the_remedy(pytester: pytest.Pytester, bare: Any) -> None:
    result = _run(pytester, "def test_it(s3): assert False")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*apt-get install radosgw*FASTPIPE_S3_ENDPOINT*"])


def test_where_a_server_is_required_tests_fail_without_one(pytester: pytest.Pytester, bare: Any) -> None:
    bare.setenv("FASTPIPE_REQUIRE_S3", "1")
    result = _run(pytester, "def test_it(s3): assert False")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*apt-get install radosgw*"])


@pytest.mark.slow
def test_a_server_may_be_named(pytester: pytest.Pytester, bare: Any) -> None:
    bare.setenv("FASTPIPE_S3_ENDPOINT", "http://127.0.0.1:9/")
    bare.setenv("AWS_ACCESS_KEY_ID", "me")
    bare.setenv("AWS_SECRET_ACCESS_KEY", "hush")
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
