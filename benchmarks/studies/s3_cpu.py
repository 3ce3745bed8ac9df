"""Processor time of server, proxy, mounts and loaders, which share the cores of one machine here."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from benchmarks.cases.s3_rows import Bucket
from fastpipe.bench.runner import Contender
from fastpipe.core.extras import require

PARTS = ("loader", "mount", "proxy", "server")


class Mounted(Protocol):
    """A program that mounts a bucket."""

    @property
    def pid(self) -> int:
        """Its process."""


class CpuMeter:
    """Reads how much processor time each part has used so far.

    Args:
        bucket: whose server and proxy.
        mounts: programs that mount it.
    """

    def __init__(self, bucket: Bucket, mounts: Iterable[Mounted]) -> None:
        self._psutil = require("psutil", extra="bench")
        self._bucket, self._mounts = bucket, {mount.pid for mount in mounts}
        self._server = set(bucket.s3.pids)

    def read(self) -> dict[str, float]:
        """Seconds by part; ``loader`` is this process and those below it that are none of the others."""
        seconds = dict.fromkeys(PARTS, 0.0)
        this = self._psutil.Process()
        for process in (this, *this.children(recursive=True)):
            with contextlib.suppress(self._psutil.NoSuchProcess):
                times = process.cpu_times()
                seconds[self._part(process.pid)] += times.user + times.system
        seconds["proxy"] += self._bucket.proxy.counts().cpu_s
        return seconds

    def _part(self, pid: int) -> str:
        if pid in self._server:
            return "server"
        if pid in self._mounts:
            return "mount"
        return "loader"


class Metered(Contender):
    """A `Contender` whose processor time is read before and after each measurement.

    Args:
        row: the contender.
        meter: reads.
    """

    def __init__(self, row: Contender, meter: CpuMeter) -> None:
        self.row, self._meter = row, meter
        self.key, self.chunk, self.workers = row.key, row.chunk, row.workers
        self._used: list[dict[str, float]] = []

    def measure(self, count: int) -> float:
        """As the row; what was used is noted for each 1,000 images."""
        before = self._meter.read()
        seconds = self.row.measure(count)
        after = self._meter.read()
        self._used.append({part: 1000 * (after[part] - before[part]) / count for part in PARTS})
        return seconds

    def used(self, rounds: int) -> dict[str, float]:
        """Median seconds by part for 1,000 images, of the last rounds."""
        last = self._used[-rounds:]
        return {part: round(statistics.median(one[part] for one in last), 3) for part in PARTS}

    def stage_seconds(self) -> Mapping[str, float]:
        """As the row."""
        return self.row.stage_seconds()

    def close(self) -> None:
        """As the row."""
        self.row.close()


def cpu_of(rows: Iterable[Metered], measured: Mapping[str, Any], rounds: int) -> dict[str, Any]:
    """Return the processor time of the rows, for the JSON file: seconds for 1,000 images by key and part.

    Args:
        rows: all.
        measured: those that were measured to the end, by key.
        rounds: how often.
    """
    return {row.key: row.used(rounds) for row in rows if measured.get(row.key)}
