"""The end of a program does not wait for a store that has no answer."""

from __future__ import annotations

import subprocess
import sys

_SCRIPT = """
import threading
import numpy as np
from fastpipe.errors import StoreBusyError
from fastpipe.stores.fetching import ObjectReader
from fastpipe.stores.retrying import Retries, RetryingStore

asked = threading.Event()

class Store:
    name = "nowhere"
    def get(self, key, version=""):
        asked.set()
        raise StoreBusyError("no answer")
    def close(self):
        pass

class Listing:
    sizes = np.ones(4, np.int64)
    def __len__(self):
        return 4
    def key(self, row):
        return str(row)
    version = path = key

# Between two tries it would wait for most of an hour.
store = RetryingStore(Store(), Retries(base=3000, cap=3000, seconds=1e6), draw=lambda: 1.0)
reader = ObjectReader(store, Listing(), None, str, connections=2, read_ahead=100)
reader.need(np.arange(4))
asked.wait()
print("over", flush=True)
"""


def test_a_program_ends_while_its_threads_wait_for_another_try() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, "over\n"), done.stderr
