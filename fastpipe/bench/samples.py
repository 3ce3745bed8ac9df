"""Are the samples of an epoch those of the source, each once?"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["RowCheck", "digests_of_samples"]


@dataclass
class RowCheck:
    """What was compared.

    Attributes:
        whose: by whom what is expected was read, in the genitive.
        epochs: how many epochs of loaders.
        samples: how many samples in them.
        problems: what is wrong; empty when all is well.
    """

    whose: str = "h5py's"
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
            return f"outputs differ from {self.whose}: {'; '.join(self.problems)}"
        return (
            f"{self.samples:,} samples in {self.epochs} epochs equal {self.whose} bit for bit, labels too,"
            " and each sample comes once in an epoch"
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
            found.update(digests_of_samples(values.numpy(), None if labels is None else labels.numpy()))
        self.add_epoch(what, expected, found)

    def add_epoch(
        self, what: str, expected: Counter[bytes], found: Counter[bytes], strange: str = "are not in the file"
    ) -> None:
        """Compare the samples of an epoch, whatever their order.

        Args:
            what: whose.
            expected, found: digests of samples, and how often each comes.
            strange: what samples are that are not expected.
        """
        self.epochs, self.samples = self.epochs + 1, self.samples + found.total()
        more, missing = (found - expected).total(), (expected - found).total()
        if more or missing:
            self._say(f"{what}: {more} samples {strange} or come too often, {missing} do not come")

    def _say(self, problem: str) -> None:
        """Note a problem."""
        self.problems += (problem,)


def digests_of_samples(values: Any, labels: Any) -> Iterator[bytes]:
    """Digests of a batch's samples, one after the other.

    Args:
        values: (N, ...).
        labels: (N,) integers, or (N, ...) arrays; None where there are none.
    """
    for number, value in enumerate(np.ascontiguousarray(values)):
        digest = hashlib.blake2b(value, digest_size=16)
        if labels is not None and labels.ndim > 1:
            digest.update(np.ascontiguousarray(labels[number]).data)
        elif labels is not None:
            digest.update(int(labels[number]).to_bytes(8, "little", signed=True))
        yield digest.digest()
