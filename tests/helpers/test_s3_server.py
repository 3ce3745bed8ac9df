"""The S3 server of the tests: it comes back with what it had, and leaves nothing behind."""

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


@pytest.fixture(scope="module")
def bucket(s3: Any) -> str:
    """Made while the gateway has not been killed: see ``S3Server.stop_gateway``."""
    return s3.bucket()  # type: ignore[no-any-return]


@pytest.mark.parametrize("kill", [False, True])
def test_a_gateway_comes_back_with_what_it_had_and_outlives_the_thread_that_starts_it(
    kill: bool, s3: Any, bucket: str
) -> None:
    s3.put(bucket, f"x-{kill}", b"1")
    s3.stop_gateway(kill=kill)
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(s3.endpoint, timeout=60)
    thread = threading.Thread(target=s3.start_gateway)
    thread.start()
    thread.join()
    while Path(f"/proc/self/task/{thread.native_id}").exists():  # whose end the kernel tells
        pass
    assert s3._fs.cat_file(f"{bucket}/x-{kill}") == b"1"
    s3.put(bucket, f"y-{kill}", b"2")
    assert {f"x-{kill}", f"y-{kill}"} <= {*s3.keys(bucket)}


_OWN = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(Path(s3_server.__file__).parent)!r})
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
