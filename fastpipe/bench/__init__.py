"""``python -m fastpipe.bench``: how much faster, on this machine and on your data.

``cli`` lists the cases, each a module with a class ``Bench``.  ``driver`` has their common parts, ``runner``
interleaves rounds, ``check`` compares outputs first.  ``data`` and ``synthetic`` provide the data,
``samples`` the code for other processes.  A result (``results``) becomes tables, a page and a picture
(``report``, ``page``, ``plot``).

``benchmarks/README.md`` describes the method.  Everything here uses only public names of fastpipe, so the
benchmark measures what a user gets.  ``benchmarks/run.py`` adds what concerns only the project: other
libraries, further data and operations, memory, first batches, a GPU, and target figures.
"""
