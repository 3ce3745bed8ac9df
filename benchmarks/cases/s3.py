"""The case ``s3``: an image folder in a bucket, from its first epoch on."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from mounts import Mount, rclone_mount, s3fs_mount
from rich.console import Console

from benchmarks.cases.s3_rows import (
    CLASSES,
    CONNECTIONS,
    FOLDER,
    WORKERS,
    Bucket,
    EmptyStages,
    FirstEpochs,
    InOrder,
    LaterEpochs,
    MountRow,
    ObstoreThreads,
    StageAll,
    best_connections,
    check_bucket,
)
from benchmarks.lines import Studied
from benchmarks.peers.rows import ChildRow, Peer
from benchmarks.studies.s3_cpu import CpuMeter, Metered, cpu_of
from benchmarks.studies.s3_refetched import refetched
from benchmarks.studies.s3_stall import Stalled, fast_stall, mount_stall, stalls
from benchmarks.targets import Asked, judged, judged_rates
from fastpipe.bench.check import Outcome
from fastpipe.bench.data import folder_to_use, scan
from fastpipe.bench.driver import DATA_HELP, Case, add_run_arguments
from fastpipe.bench.images import MEAN, SIDE, STD
from fastpipe.bench.results import RowInfo
from fastpipe.bench.runner import Contender, Sample, Session
from fastpipe.console import positive

# ---- The rows of the case that are other readers of buckets, each in a process of its own -----------

BUCKET_PEERS = (
    Peer(
        "first-boto3", f"boto3 in DataLoader(num_workers={WORKERS})", "objects", "pip install boto3", "boto3",
        note="get_object for each photo", options={"kind": "boto3"},
    ),
    Peer(
        "first-connector", f"S3 connector, S3MapDataset in DataLoader(num_workers={WORKERS})", "objects",
        "pip install s3torchconnector", "s3torchconnector", options={"kind": "connector"},
    ),
    Peer(
        "first-raw", f"LitData, StreamingRawDataset in DataLoader(num_workers={WORKERS})", "objects",
        "pip install litdata", "litdata", note="fetches the photos of a batch side by side",
        options={"kind": "raw"},
    ),
)  # fmt: skip


def row_info(peer: Peer, section: str) -> RowInfo:
    """The row's label in the report."""
    return RowInfo(
        peer.key, peer.label, "peer", WORKERS, "float32", peer.note, section=section, unit="images"
    )


# Of an epoch of theirs: at their rates that is long enough.
_MOST_BATCHES = 16


class BucketPeerRow(ChildRow):
    """A peer that goes through whole epochs of a bucket's objects.

    Args:
        peer: which library.
        python: the interpreter that has it.
        bucket: what it reads.
        batch_size: images in a batch.
        section: of the report.

    Attributes:
        info: the row, with what the child told.

    Raises:
        ContenderError: the child does not start, or its first batch is not what it should be.
    """

    def __init__(self, peer: Peer, python: str, bucket: Bucket, batch_size: int, section: str) -> None:
        options = bucket.options
        epoch = min(len(bucket.keys), _MOST_BATCHES * batch_size) // batch_size * batch_size
        job = {
            "folder": FOLDER,
            "indices": list(range(len(bucket.keys))),
            "files": bucket.keys,
            "labels": bucket.labels,
            "batch_size": batch_size,
            "threads": WORKERS,
            "side": SIDE,
            "mean": MEAN,
            "std": STD,
            "output": "float32",
            "options": {
                **peer.options,
                "workers": WORKERS,
                "epoch": epoch,
                "bucket": bucket.name,
                "endpoint": options["endpoint_url"],
                "key": options["key"],
                "secret": options["secret"],
            },
        }
        super().__init__(peer, python, job, batch_size, WORKERS)
        self.chunk = epoch
        self.info = replace(row_info(peer, section), versions=self.first_batch["versions"])


# ---- What was asked of fastpipe for buckets, as figures, and whether it is met ----------------------

MOST_STALL, MOST_REFETCHED = 5.0, 55.0  # %

ASKED = (
    Asked("first epoch with a stage, × the tuned rclone mount", "first-stage", "first-replaced", 2),
    Asked("first epoch with a stage, × the s3fs-fuse mount", "first-stage", "first-s3fs", 15),
    Asked("fetched in order, × obstore alone at its best", "fetch-ahead", "fetch-replaced", 0.85),
    Asked("later epochs, × the local folder", "later-stage", "later-replaced", 0.95),
)


def targets(
    samples: Mapping[str, Sequence[Sample]],
    stall: Mapping[str, Any] | None,
    refetch: Mapping[str, Any] | None,
) -> list[dict[str, Any]]:
    """Return all targets with the measured figures.

    Args:
        samples: of a finished run, by row.
        stall: from `s3_stall.stalls`; None where it was not measured.
        refetch: from `s3_refetched.refetched`; None where it was not measured.
    """
    rows = [] if stall is None else stall["rows"]
    waited = [100 * share for row in rows if row["key"] == "first-stage" for share in row["raw"]]
    again = [] if refetch is None else [100 * share for share in refetch["raw"]]
    return [
        *judged_rates(samples, ASKED),
        judged("part of the first epoch that a step at 300 images/s waits", MOST_STALL, "%", waited,
               is_most=True),
        judged("part of the objects that a stage of half the size downloads again", MOST_REFETCHED, "%",
               again, is_most=True),
    ]  # fmt: skip


# ---- The case ``s3``: its options, its rows, its result ---------------------------------------------

FIRST, FETCH, LATER = "first", "fetch", "later"
_MAIN = "first-stage"
_FAST = "FastImageFolder + FastLoader"
_BATCHES, _RUNS = 48, 3
_DELAY_MS, _JITTER_MS = 30.0, 10.0
# For the files that s3fs-fuse makes and removes, one for each that is read: ext4 would pass over all of them
# for minutes, whenever the stage makes a file.
_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


class Bench(Studied, Case):
    """One run of the case."""

    case = "s3"
    about = "images of a bucket: ImageFolder over a mount + DataLoader against FastImageFolder + FastLoader"
    quick_s = 0.01
    main = _MAIN
    bucket: Bucket
    name: str

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Add the options of the case."""
        add = parser.add_argument
        add("--data", metavar="FOLDER", type=Path,
            help=f"image folder whose photos are put into the bucket{DATA_HELP}")  # fmt: skip
        add("--objects", type=positive(int), metavar="N",
            help=f"objects to make of the photos, whole batches (default: {_BATCHES} batches)")  # fmt: skip
        add("--batch-size", type=positive(int), default=64, metavar="N",
            help="images in a batch (default: 64)")  # fmt: skip
        add("--delay", type=positive(float), default=_DELAY_MS, metavar="MS",
            help=f"milliseconds until an answer begins, ± a third (default: {_DELAY_MS:g})")  # fmt: skip
        add_run_arguments(parser)

    def run(self, console: Console) -> int:
        """Measure while there is a bucket.

        Raises:
            OptionError: the photos cannot be used, or there is no S3 server.
        """
        args, say = self.args, self.progress.done
        folder, self.name, _ = folder_to_use(args.data, say)
        photos = scan(folder, self.name)
        batches = 2 if args.quick else _BATCHES
        count = max(CLASSES, args.objects or batches * args.batch_size) // args.batch_size * args.batch_size
        count = max(count, args.batch_size)
        jitter = args.delay * _JITTER_MS / _DELAY_MS
        with Bucket(photos, count, args.delay, jitter, say) as self.bucket:
            return super().run(console)

    def prepare(self) -> None:
        """Do nothing: the bucket exists."""

    def compared(self, rows: Sequence[Any]) -> Outcome:
        """Compare the bucket with the local folder."""
        return check_bucket(self.bucket, self.args.batch_size, self.progress.now)

    def rows(self) -> list[Contender]:
        """Build no rows before images are compared."""
        return []

    def others(self) -> list[Contender]:
        """Build all rows."""
        mounts = self._mounts()
        meter = CpuMeter(self.bucket, mounts.values())
        self.first = [Metered(row, meter) for row in self._first(mounts)]
        return [*self.first, *self._fetch(), *self._later()]

    def described(self, session: Session) -> dict[str, Any]:
        """Return what was read, and measure what steps wait."""
        self.stall = self._stall([one.row for one in self.first], session)
        return self._facts()

    def studies(self, session: Session) -> dict[str, Any]:
        """Measure what is downloaded again, and judge the figures that were asked for."""
        size, say = self.args.batch_size, self.progress.step
        refetch = None if self.args.quick else refetched(self.bucket, size, _RUNS, say)
        return {
            "targets": targets(session.samples, self.stall, refetch),
            "stall": self.stall or {},
            "refetch": refetch or {},
            "cpu": cpu_of(self.first, session.samples, session.rounds),
        }

    # ---- rows ---------------------------------------------------------------------------------

    def _mounts(self) -> dict[str, Mount]:
        """The bucket as folders, by whoever can: name → mount."""
        options, found = self.bucket.options, {}
        temporary = self.stack.enter_context(
            tempfile.TemporaryDirectory(prefix="fastpipe-bench-", dir=_MEMORY)
        )
        s3fs = partial(s3fs_mount, options=[f"tmpdir={temporary}"])
        for name, mount in (("rclone", rclone_mount), ("s3fs", s3fs)):
            folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory(prefix="fastpipe-bench-")))
            given = options["endpoint_url"], self.bucket.name, options["key"], options["secret"], folder
            try:
                found[name] = self.stack.enter_context(mount(*given))
            except RuntimeError as error:
                self.miss(f"first-{name}", f"ImageFolder over a mount by {name}", str(error))
        return found

    def _first(self, mounts: dict[str, Mount]) -> list[Contender]:
        """Rows of the first epoch."""
        size, stock = self.args.batch_size, f"DataLoader(num_workers={WORKERS})"
        found: list[Contender] = []
        for name, words in (("rclone", "tuned rclone mount"), ("s3fs", "s3fs-fuse mount")):
            # Without rclone the other mount is what is replaced.
            is_replaced = name == "rclone" or "rclone" not in mounts
            key = "first-replaced" if is_replaced else f"first-{name}"
            group = "replaced" if is_replaced else "peer"
            if name in mounts:
                folder = mounts[name].path / FOLDER
                info = self._info(key, f"ImageFolder over a {words} + {stock}", group, FIRST, WORKERS)
                found += self._add(info, partial(MountRow, key, folder, size))
        if not found:
            info = self._info("first-replaced", f"ImageFolder over a local folder + {stock}", "replaced",
                              FIRST, WORKERS, "no mount: neither rclone nor s3fs, or no FUSE")  # fmt: skip
            found += self._add(info, partial(MountRow, info.key, self.bucket.folder, size))
        for key, words, stages in ((_MAIN, ", stage=", True), ("first-ahead", "", False)):
            note = "empty stage" if stages else "fetched ahead, kept nowhere"
            info = self._info(key, f"{_FAST}{words}", "fastpipe", FIRST, 0, note)
            place = self.stack.enter_context(EmptyStages()) if stages else None
            found += self._add(info, partial(FirstEpochs, key, self.bucket, size, place))
        for peer in BUCKET_PEERS if self.args.peers else ():
            found += self.peer(peer, row_info(peer, FIRST), partial(self._started, peer))
        return found

    def _started(self, peer: Peer, python: str) -> BucketPeerRow:
        return BucketPeerRow(peer, python, self.bucket, self.args.batch_size, FIRST)

    def _fetch(self) -> list[Contender]:
        """Rows that fetch alone."""
        bucket, size = self.bucket, self.args.batch_size
        threads = best_connections(bucket, CONNECTIONS[:1] if self.args.quick else CONNECTIONS,
                                   self.progress.done)  # fmt: skip
        stages = self.stack.enter_context(EmptyStages())
        tried = ", ".join(map(str, CONNECTIONS))
        rows: list[tuple[RowInfo, Callable[[], Contender]]] = [
            (self._info("fetch-replaced", f"obstore.get in {threads} threads", "replaced", FETCH, None,
                        f"the best of {tried}"), partial(ObstoreThreads, "fetch-replaced", bucket, threads)),
            (self._info("fetch-ahead", "FastImageFolder's reader, a random order", "fastpipe", FETCH, None),
             partial(InOrder, "fetch-ahead", bucket, size)),
            (self._info("fetch-stage", "FastImageFolder.stage_all", "fastpipe", FETCH, None,
                        "written to an empty stage"), partial(StageAll, "fetch-stage", bucket, stages)),
        ]  # fmt: skip
        return [row for info, make in rows for row in self._add(info, make)]

    def _later(self) -> list[Contender]:
        """Rows of later epochs."""
        folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory(prefix="fastpipe-bench-")))
        bucket, size = self.bucket, self.args.batch_size
        rows = [
            (self._info("later-replaced", f"{_FAST}, the same files in a local folder", "replaced", LATER, 0),
             partial(LaterEpochs, "later-replaced", bucket, size, None)),
            (self._info("later-stage", f"{_FAST}, stage=", "fastpipe", LATER, 0, "from the second epoch on"),
             partial(LaterEpochs, "later-stage", bucket, size, folder / "stage")),
        ]  # fmt: skip
        return [row for info, make in rows for row in self._add(info, make)]

    def _add(self, info: RowInfo, make: Callable[[], Contender]) -> list[Contender]:
        self.progress.now(f"starting {info.label}")
        return self.opened([(info, make)])

    def _info(
        self, key: str, label: str, group: str, section: str, workers: int | None, note: str = ""
    ) -> RowInfo:
        unit = "objects" if section == FETCH else "images"
        output = "bytes" if section == FETCH else "float32"
        return RowInfo(key, label, group, workers, output, note, section=section, unit=unit)

    # ---- what is no rate ----------------------------------------------------------------------

    def _stall(self, rows: list[Contender], session: Session) -> dict[str, Any] | None:
        """Stalls of the rows in this process; None where they are not measured."""
        if self.args.quick:
            return None
        bucket, size = self.bucket, self.args.batch_size
        found: list[Stalled] = []
        for row in rows:
            label = self.infos[row.key].label
            if isinstance(row, FirstEpochs):
                found.append(fast_stall(row.key, label, bucket, size, row.stages))
            elif isinstance(row, MountRow) and session.samples.get(row.key):
                found.append(mount_stall(row, label, row.chunk))
        return self.tried("stall", partial(stalls, found, _RUNS, say=self.progress.step))

    def _facts(self) -> dict[str, Any]:
        """Return the data that were read."""
        args, bucket = self.args, self.bucket
        count, jitter = len(bucket.keys), args.delay * _JITTER_MS / _DELAY_MS
        where = (
            "on this machine, as are proxy and loaders" if bucket.s3.server else "at $FASTPIPE_S3_ENDPOINT"
        )
        server = f"an S3 server (Ceph's gateway) {where}"
        return {
            "data": {
                "text": f"{count:,} objects of {bucket.nbytes / count / 1000:.0f} kB ({self.name}) in "
                f"{server}; {args.delay:g} ± {jitter:g} ms until an answer begins",
                "name": self.name, "objects": count, "bytes": bucket.nbytes, "classes": CLASSES,
                "delay_ms": args.delay, "jitter_ms": jitter,
            },
            "sections": {
                FIRST: {"label": "first epoch, nothing on this machine yet"},
                FETCH: {"label": "objects fetched, not decoded"},
                LATER: {"label": "later epochs"},
            },
            "job": {
                "text": f"bucket of photos → RandomResizedCrop(224), flip, ToTensor, Normalize, batches of "
                f"{args.batch_size}",
                "short": f"photos of a bucket, batch {args.batch_size}",
                "batch_size": args.batch_size,
            },
        }  # fmt: skip
