"""``python -m fastpipe.bench``: how much faster, on this machine and on your data.

========================  ==========================================================
``cli``                   ``fastpipe bench``: its cases and their options
``runner``                interleaved rounds and their statistics; knows nothing of images
``driver``                what every case does in the same way
``data`` ``machine``      which photos are read; what the machine and the packages are
``overview``              the case ``all``: five pipelines before and after, the default
``images``                the case: its rows, its check, its result
``scaling*`` ``curves``   the case ``scaling``: images, rows or patches by number of threads, and its picture
``loaders`` ``floor``     the rows of these cases: loaders in this process, decoding alone
``peers`` ``peer_child``  the rows of the case: other libraries, each in its own process
``hdf5`` ``volume``       other cases, each in a folder: also ``s3``, ``augment``, ``tf``, ``generate``,
                          ``gpu``
``windows`` ``places``    orders and places that peers of these cases have too
``samples`` ``memory``    what these cases compare, and how they measure memory
``stall``                 what a training step waits for its batches
``targets``               what was asked for, and whether it is met
``startup``               time to the first batch, in fresh processes
``check``                 are the pixels, labels and order those of the replaced loader?
``results``               the JSON file
``compare``               what is faster or slower than in an older file
``report`` ``plot``       table, sentence, Markdown, picture; ``lines``: figures that some cases have
``page`` ``pages``        the page of a result; what pages of fastpipe's have in common
``writing``               files that are there whole, or as they were
========================  ==========================================================

The method is written down in ``benchmarks/README.md``.  Everything here uses the public
names of fastpipe only, so the benchmark measures what a user gets.
"""

from __future__ import annotations

__all__: list[str] = []
