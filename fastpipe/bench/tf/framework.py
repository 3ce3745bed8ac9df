"""TensorFlow, when it is first needed."""

from __future__ import annotations

import os
from typing import Any

from fastpipe.core.extras import require

__all__ = ["tensorflow"]


def tensorflow() -> Any:
    """The package, which keeps its messages to itself unless the user has said otherwise.

    Raises:
        MissingDependencyError: it is not installed.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # read when it is imported
    return require("tensorflow", extra="tf")
