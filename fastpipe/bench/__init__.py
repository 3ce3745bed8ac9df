"""``python -m fastpipe.bench``: how much faster, on this machine and on your data.

=============================  ================================================================
``cli``                        ``fastpipe bench``: its cases and their options
``runner``                     interleaved rounds, their statistics, and what steps wait for
``driver``                     what every case does in the same way
``overview``                   the case ``all``: five pipelines before and after, the default
``images`` ``scaling``         image folders; by the number of threads
``hdf5`` ``volume``            cases of arrays
``tf`` ``augment``             pipelines of ``tf.data``; batches that are augmented
``generate``                   rows of functions
``samples``                    rows and patches that other processes make or read, with NumPy alone
``data`` ``synthetic``         which photos are read, and made-up data
``check``                      are outputs those of the replaced loader?
``machine``                    what the machine and the packages are
``results``                    the JSON file
``report`` ``page`` ``plot``   tables and sentences, changes since an older run; a page; a picture
=============================  ================================================================

The method is written down in ``benchmarks/README.md``.  Everything here uses public names of fastpipe only,
so the benchmark measures what a user gets.  ``benchmarks/run.py`` adds what concerns the project alone: other
libraries, further data and operations, memory, first batches, a GPU, and figures that were asked for.
"""

from __future__ import annotations

__all__: list[str] = []
