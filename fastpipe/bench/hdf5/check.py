"""Before anything is timed: are the batches the rows of the file, each once?"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastpipe._extras import require
from fastpipe.bench.hdf5.data import Table
from fastpipe.bench.hdf5.rows import TableSpec, loader_of, quiet

__all__ = ["RowCheck", "check_rows", "digests_of"]

_AT_ONCE = 256


@dataclass
class RowCheck:
    """What was compared.

    Attributes:
        epochs: how many epochs of loaders.
        samples: how many samples in them.
        problems: what is wrong; empty when all is well.
    """

    epochs: int = 0
    samples: int = 0
    problems: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def sentence(self) -> str:
        """The outcome in words."""
        if not self.ok:
            return f"outputs differ from h5py's: {'; '.join(self.problems)}"
        return (
            f"{self.samples:,} samples in {self.epochs} epochs equal h5py's bit for bit, labels too, and each"
            " sample comes once in an epoch"
        )

    def as_json(self) -> dict[str, Any]:
        """The outcome for the JSON file."""
        told = {"epochs": self.epochs, "samples": self.samples}
        return {**told, "problems": list(self.problems), "ok": self.ok, "text": self.sentence()}

    def add(self, what: str, expected: Counter[bytes], batches: Iterable[Any]) -> None:
        """Compare an epoch.

        Args:
            what: whose.
            expected: digests of what is in the file, and how often.
            batches: the epoch.
        """
        found: Counter[bytes] = Counter()
        for batch in batches:
            values, labels = batch if isinstance(batch, (list, tuple)) else (batch, None)
            found.update(_digests(values.numpy(), None if labels is None else labels.numpy()))
        self.epochs, self.samples = self.epochs + 1, self.samples + found.total()
        strange, missing = (found - expected).total(), (expected - found).total()
        if strange or missing:
            self.problems += (
                f"{what}: {strange} samples are not in the file or come too often, {missing} do not come",
            )


def check_rows(
    pairs: Iterable[tuple[Table, TableSpec]], say: Callable[[str], None] = lambda text: None
) -> RowCheck:
    """Compare an epoch of each row, two where chunks are kept, with what h5py reads.

    Args:
        pairs: tables and the rows on them.
        say: told what is compared.
    """
    check = RowCheck()
    expected: tuple[str, Counter[bytes]] = "", Counter()
    for table, spec in pairs:
        if expected[0] != table.key:
            expected = table.key, digests_of(table)
        say(f"comparing: {table.label}: {spec.label}")
        with quiet():
            loader = loader_of(spec, table)
            for epoch in range(2 if spec.kind == "ram" else 1):
                check.add(f"{table.label}: {spec.label}, epoch {epoch}", expected[1], loader)
    return check


def digests_of(table: Table) -> Counter[bytes]:
    """Digests of the samples as h5py reads them, and how often each comes."""
    found: Counter[bytes] = Counter()
    dims = table.sample_dims
    with require("h5py", extra="hdf5").File(table.path, "r") as file:
        dataset = file[table.dataset]
        for first in range(0, table.shape[0], _AT_ONCE):
            part = dataset[first : first + _AT_ONCE]
            values = part.reshape(-1, *table.shape[dims:])
            labels = (
                None if table.labels is None else file[table.labels][first : first + _AT_ONCE].reshape(-1)
            )
            found.update(_digests(values, labels))
    return found


def _digests(values: Any, labels: Any) -> Iterator[bytes]:
    for number, value in enumerate(np.ascontiguousarray(values)):
        digest = hashlib.blake2b(value, digest_size=16)
        if labels is not None:
            digest.update(int(labels[number]).to_bytes(8, "little", signed=True))
        yield digest.digest()
