"""``python -m fastpipe.bench``: how much faster, on this machine and on your data.

``cli`` has the cases, each a module with a class ``Bench``; ``driver`` does what all of them do in the same
way, ``runner`` interleaves rounds, ``check`` compares outputs before; ``data`` and ``synthetic`` have what is
read, ``samples`` what other processes need.  A result (``results``) becomes tables, a page and a picture
(``report``, ``page``, ``plot``).

The method is written down in ``benchmarks/README.md``.  Everything here uses public names of fastpipe only,
so the benchmark measures what a user gets.  ``benchmarks/run.py`` adds what concerns the project alone: other
libraries, further data and operations, memory, first batches, a GPU, and figures that were asked for.
"""
