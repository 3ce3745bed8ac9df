"""The case ``hdf5``: rows of HDF5 files, read one by one by many scripts, against ``FastHDF5Dataset``.

===========  =====================================================================
``case``     its options, its rows, its result
``data``     which files are read
``rows``     the rows: loaders in this process
``sources``  the datasets and loops that scripts have without fastpipe
``peers``    the rows: other readers, each in its own process
``evaluate`` the rows: a model judged file by file
``check``    are the batches the rows of the file?
``first``    time to the first batch, in fresh processes
``memory``   memory of the process tree, in fresh processes
``targets``  what was asked for, and whether it is met
===========  =====================================================================
"""

from __future__ import annotations

__all__: list[str] = []
