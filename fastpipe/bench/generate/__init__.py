"""The case ``generate``: rows that a function makes, stored in a file: a script's loop, and other libraries'
processes, against ``fastpipe.generate``.

=============  ===============================================================
``case``       its options, its rows, its result
``functions``  the functions; workers import this module alone
``rows``       the rows: a script's loop, ``fastpipe.generate``
``peers``      the rows: other libraries
``check``      does each store what the function returns?
``predicted``  does ``probe`` say how long it will take?
``memory``     memory of the process that calls ``generate``, in fresh ones
``targets``    what was asked for
=============  ===============================================================
"""

from __future__ import annotations

__all__: list[str] = []
