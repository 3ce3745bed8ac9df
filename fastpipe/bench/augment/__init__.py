"""The case ``augment``: batches augmented sample by sample by many scripts, against ``fastpipe.augment``.

============  ====================================================================
``case``      its options, its rows, its result
``data``      which batches are augmented
``recipes``   what is done to them: recipes of papers, and single operations
``scripts``   the same for spectrograms, as a script writes it
``rows``      the rows: what augments in this process
``peers``     the rows: other libraries, each in its own process
``loading``   the rows: loaders, from files
``check``     are the images those of torchvision's functions?  Does a call wait?
``single``    figures of single operations
``targets``   what was asked for
============  ====================================================================
"""

from __future__ import annotations

__all__: list[str] = []
