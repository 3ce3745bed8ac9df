"""Import this first: then ``benchmarks`` and the helpers of ``tests/support`` can be imported, here and in
processes that are started from here."""

import os
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
_FOLDERS = [str(_ROOT), str(_ROOT / "tests" / "support")]

sys.path[:0] = _FOLDERS
os.environ["PYTHONPATH"] = os.pathsep.join([*_FOLDERS, *filter(None, [os.environ.get("PYTHONPATH")])])
