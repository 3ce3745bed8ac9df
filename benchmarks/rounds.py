"""The option that the scripts of this folder have in common."""

from __future__ import annotations

import argparse

__all__ = ["rounds_asked"]


def rounds_asked(about: str | None, default: int, what: str) -> int:
    """How many rounds the command line asks for.

    Args:
        about: the script's docstring.
        default: without the option.
        what: is measured in a round.
    """
    parser = argparse.ArgumentParser(description=(about or "").partition("\n")[0])
    parser.add_argument(
        "--rounds", type=int, default=default, help=f"measurements of {what} (default: {default})"
    )
    rounds: int = parser.parse_args().rounds
    if rounds < 1:
        parser.error(f"--rounds must be at least 1, got {rounds}")
    return rounds
