"""The case ``volume``: random patches of a chunked volume, cut with zarr-python by many scripts, against
``FastPatchDataset``.

=================  ===============================================================
``case``           its options, its rows, its result
``data``           which volume is read
``rows``           the rows: loaders in this process
``peers``          the rows: other readers, each in its own process
``check``          are the patches those of the volume?
``amplification``  bytes decoded for each that is used
``memory``         memory of the process tree, in fresh processes
``targets``        what was asked for
=================  ===============================================================
"""

from __future__ import annotations

__all__: list[str] = []
