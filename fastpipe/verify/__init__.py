"""``fastpipe verify FOLDER``: does the swap leave the results of this folder the same?

===========  ======================================================================
``cli``      the command's options, and its run from start to end
``chains``   the transforms: named ones, and the user's own
``compare``  every sample by both datasets: equal, different, unreadable
``values``   whatever a transform gives, as arrays that can be compared
``report``   what people read, and the JSON file
===========  ======================================================================

Like the benchmark, it uses the public names of fastpipe only, so it looks at what a user gets.
"""

from __future__ import annotations

__all__: list[str] = []
