"""``python -m fastpipe.bench`` measures how much faster fastpipe is on this machine and on the user's data.

A *case* is a benchmark of one kind of data; ``cli`` lists all cases.  Each case is a module with a class
``Bench``.  ``driver`` has the common parts of the cases.  ``check`` compares outputs before a measurement,
and ``runner`` measures all loaders in interleaved rounds.  ``data`` and ``synthetic`` provide the data, and
``samples`` has the code for other processes.  ``results`` defines the result file.  ``report``, ``page`` and
``plot`` make tables, a page and a picture from a result.

``benchmarks/README.md`` describes the method.  All modules here use only public names of fastpipe, so the
benchmark measures what a user gets.  ``benchmarks/run.py`` adds what only developers of fastpipe need: other
libraries, more data and operations, memory, the time to the first batch, a GPU, and the project's targets.
"""
