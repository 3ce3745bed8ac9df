"""The rows of the case that are other readers of buckets, each in a process of its own."""

from __future__ import annotations

from dataclasses import replace

from fastpipe.bench.loaders import MEAN, SIDE, STD
from fastpipe.bench.peers import ChildRow, Peer
from fastpipe.bench.results import RowInfo
from fastpipe.bench.s3.bucket import FOLDER, Bucket
from fastpipe.bench.s3.rows import WORKERS

__all__ = ["BUCKET_PEERS", "BucketPeerRow", "row_info"]

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
    """What the report calls it."""
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
