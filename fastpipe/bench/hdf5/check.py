"""Before anything is timed: are the batches the rows of the file, each once?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from fastpipe.bench.hdf5.data import Table
from fastpipe.bench.hdf5.rows import TableSpec, loader_of, quiet
from fastpipe.bench.samples import RowCheck, digests_of_samples

__all__ = ["RowCheck", "check_rows", "digests_of"]

_AT_ONCE = 256


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
    with table.opened() as file:
        dataset = file[table.dataset]
        for first in range(0, table.shape[0], _AT_ONCE):
            part = dataset[first : first + _AT_ONCE]
            values = part.reshape(-1, *table.shape[dims:])
            labels = (
                None if table.labels is None else file[table.labels][first : first + _AT_ONCE].reshape(-1)
            )
            found.update(digests_of_samples(values, labels))
    return found
