"""TensorFlow and torch in one process."""

from __future__ import annotations

import importlib
import os
import sys

__all__ = ["load_triton_apart"]


def load_triton_apart() -> None:
    """Load triton, which torch imports when it needs it, so that it does not use TensorFlow's LLVM.

    TensorFlow's libraries export the symbols of the LLVM inside them.  A library that is loaded later and
    has an LLVM as well gets those, registers its options a second time, and the process is aborted: ``import
    torchvision`` is enough.  Bound to its own symbols first, triton works.  Where it is loaded already, or
    before TensorFlow, nothing has to be done.
    """
    if "triton" in sys.modules or "torch" not in sys.modules or "tensorflow" not in sys.modules:
        return
    if not hasattr(os, "RTLD_DEEPBIND"):  # not Linux with glibc
        return
    before = sys.getdlopenflags()
    sys.setdlopenflags(before | os.RTLD_DEEPBIND)
    try:
        importlib.import_module("triton._C.libtriton")
    except ImportError:
        pass  # torch goes without it too
    finally:
        sys.setdlopenflags(before)
