"""``python -m fastpipe.bench`` does the same as ``fastpipe bench``."""

from __future__ import annotations

import sys

from fastpipe.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]]))
