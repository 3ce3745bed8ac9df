"""Log-mel spectrograms, of sound and made up."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np

from fastpipe.bench.synthetic import mel_rows, write_table


def test_rows_depend_on_the_seed_alone() -> None:
    one, other = (mel_rows(np.random.default_rng(7), 300, (16, 20)) for _ in range(2))
    assert one.dtype == np.float32 and np.array_equal(one, other)
    assert not np.array_equal(one, mel_rows(np.random.default_rng(8), 300, (16, 20)))


def test_rows_are_smooth_and_compress_as_real_ones(tmp_path: Path) -> None:
    rows = mel_rows(np.random.default_rng(0), 64)
    assert np.diff(rows, axis=1).std() < 0.6 * rows.std() and np.diff(rows, axis=2).std() < 0.6 * rows.std()
    ratios = {}
    for compression in ("gzip", "lzf", None):
        path = write_table(
            tmp_path / f"{compression}.h5",
            "x",
            [rows],
            rows.shape,
            chunk=(16, 64, 128),
            compression=compression,
        )
        with h5py.File(path) as file:
            assert np.array_equal(file["x"][:], rows)
            ratios[compression] = rows.nbytes / file["x"].id.get_storage_size()
    # 260 s of speech at 8 kHz, 64 bands, in the same chunks: 1.27 and 1.17.
    assert 1.2 < ratios["gzip"] < 1.4 and 1.1 < ratios["lzf"] < 1.3 and ratios[None] == 1
