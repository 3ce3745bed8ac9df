"""The command ``fastpipe``: its parts, their errors as one line, their exit codes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

import fastpipe
from fastpipe.bench import cli as bench
from fastpipe.bench.command import Command
from fastpipe.bench.progress import Progress
from fastpipe.errors import FastpipeError
from fastpipe.files import inspect_cli, repack_cli, scan_cli, stage_cli
from fastpipe.generation import generate_cli
from fastpipe.profiling import doctor_cli, profile_cli
from fastpipe.verify import cli as verify

__all__ = ["COMMANDS", "main"]

# Wide enough for a table where the output is a file or a pipe.
PLAIN_WIDTH = 160


COMMANDS = {
    "verify": Command(verify.ABOUT, verify.add_arguments, verify.run),
    "bench": Command(bench.ABOUT, bench.add_arguments, bench.run, bench.with_default_case),
    "inspect": Command(inspect_cli.ABOUT, inspect_cli.add_arguments, inspect_cli.run),
    "repack": Command(repack_cli.ABOUT, repack_cli.add_arguments, repack_cli.run),
    "stage": Command(stage_cli.ABOUT, stage_cli.add_arguments, stage_cli.run),
    "scan": Command(scan_cli.ABOUT, scan_cli.add_arguments, scan_cli.run),
    "generate": Command(generate_cli.ABOUT, generate_cli.add_arguments, generate_cli.run),
    "doctor": Command(doctor_cli.ABOUT, doctor_cli.add_arguments, doctor_cli.run),
    "profile": Command(profile_cli.ABOUT, profile_cli.add_arguments, profile_cli.run),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: arguments without the program's name; ``None`` takes the process's own.

    Returns:
        Exit code: 0 done, 1 what was looked for was found (outputs that differ, images that cannot be read, a
        problem), 2 bad input, 130 interrupted.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in COMMANDS:
        arguments[1:] = COMMANDS[arguments[0]].prepare(arguments[1:])
    args = _parser().parse_args(arguments)
    errors = Console(stderr=True)
    try:
        output = Console() if sys.stdout.isatty() else Console(width=PLAIN_WIDTH)
        with Progress(errors) as progress:
            return COMMANDS[args.command].run(args, output, progress)
    except BrokenPipeError:
        return 0
    except (FastpipeError, OSError) as error:
        # As Text, because rich makes pictures of words such as ":x:" in a plain string.
        errors.print(Text(f"fastpipe {args.command}: {error}", style="red"), soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        errors.print(f"fastpipe {args.command}: interrupted")
        return 130


def _parser() -> argparse.ArgumentParser:
    """The parser, put together from the commands'."""
    parser = argparse.ArgumentParser(
        "fastpipe", description="Make the input pipeline of a training script fast."
    )
    parser.add_argument("--version", action="version", version=f"fastpipe {fastpipe.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        about = f"{command.about[:1].upper()}{command.about[1:]}."
        command.add_arguments(commands.add_parser(name, help=command.about, description=about))
    return parser
