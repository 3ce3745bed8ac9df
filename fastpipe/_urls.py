"""URLs of stores, told from paths."""

from __future__ import annotations

import os
import re

__all__ = ["SCHEME", "is_url"]

# One letter is a drive of Windows.
SCHEME = re.compile(r"([a-z][a-z0-9+.\-]+(?:::[a-z][a-z0-9+.\-]+)*)://", re.IGNORECASE)


def is_url(root: str | os.PathLike[str]) -> bool:
    """Whether a dataset's root is the URL of a store, not a folder.

    >>> is_url("s3://bucket/train"), is_url("/data/train"), is_url("/data/odd://name"), is_url("C:\\\\data")
    (True, False, False, False)
    """
    return isinstance(root, str) and SCHEME.match(root) is not None
