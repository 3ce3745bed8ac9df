"""A worker that is forked, and reads the path of every sample, copies none of its parent's memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

# In a process of its own: what pytest and torch keep would be copied as well.
_SCRIPT = """if True:
    import gc, json, os
    from fastpipe.core.sample_tables import Packed, pack_paths
    from fastpipe.core.sample_tables import SampleTableBuilder, TargetTable

    def private_bytes():
        with open("/proc/self/smaps_rollup") as file:
            return sum(1024 * int(line.split()[1]) for line in file if line.startswith("Private_Dirty:"))

    def grown(samples, targets):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            gc.disable()
            before = private_bytes()
            read = sum(len(path) + target for path, target in samples) + sum(targets)
            os.write(writer, f"{private_bytes() - before} {read}".encode())
            os._exit(0)
        os.waitpid(pid, 0)
        answer = os.read(reader, 100).split()
        return [int(number) for number in answer]

    builder = SampleTableBuilder("/data/")
    for number in range(200):
        block, lengths = pack_paths(f"{number}/", [f"{name:08}.jpg" for name in range(1000)])
        # As memory of a kept index, and as a folder's own.
        builder.add_packed(Packed(memoryview(block) if number % 2 else block, lengths), number)
    table = builder.build()
    targets = TargetTable(table.targets_array())
    flat = grown(table, targets)
    items = list(table)
    print(json.dumps({"table": flat, "list": grown(items, list(targets))}))
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps_rollup"), reason="run it on Linux")
def test_a_forked_worker_reads_every_path_without_copying_memory() -> None:
    done = subprocess.run([sys.executable, "-c", _SCRIPT], stdout=subprocess.PIPE, check=True)
    (table, table_read), (plain, plain_read) = json.loads(done.stdout).values()
    assert table_read == plain_read
    assert plain > 16 * 2**20  # a list of tuples is copied as its reference counts are written
    assert table < 2**20
