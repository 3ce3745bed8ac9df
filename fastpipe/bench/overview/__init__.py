"""The case ``all``: five training pipelines before and after, each in a process of its own.

============  ====================================================================
``case``      its options, its result: that of all five put together
``apart``     a process for each of the five, with a limit to its time
``child``     what runs there
``pair``      one of the five measured: its check, its rounds, its steps
``cases``     the five: rows of the other cases, over small data
============  ====================================================================
"""

from __future__ import annotations

__all__: list[str] = []
