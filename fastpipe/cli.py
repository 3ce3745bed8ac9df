"""The ``fastpipe`` command: its subcommands, their one-line errors and their exit codes."""

from __future__ import annotations

import argparse
import difflib
import importlib
import sys
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, NoReturn

import fastpipe
from fastpipe.core.text import printable
from fastpipe.errors import FastpipeError

# The width of tables if the output is a file or a pipe.
PLAIN_WIDTH = 160


class Command(NamedTuple):
    """A subcommand of ``fastpipe``: the name of the subcommand's module, and one line of help.

    The module has the functions ``add_arguments(parser)`` and ``run(args, output, progress)``.  ``run``
    returns the exit code.  The module may also have a help text ``EPILOG`` and a function
    ``prepare(arguments)``, which completes the arguments before they are parsed.
    """

    module: str
    about: str

    def load(self) -> Any:
        return importlib.import_module(self.module)  # imported only when the command is used

    def prepare(self, arguments: list[str]) -> list[str]:
        prepared: list[str] = getattr(self.load(), "prepare", list)(arguments)
        return prepared


COMMANDS = {
    name: Command(f"fastpipe.{module}", about)
    for name, module, about in (
        ("verify", "tools.verify",
         "compare FastImageFolder with torchvision's ImageFolder on your own images"),
        ("bench", "bench.cli",
         "measure fastpipe against the loader it replaces, on this machine and on your data"),
        ("inspect", "tools.inspect",
         "say how an HDF5 file's datasets, or a volume, are stored, and what that costs in training"),
        ("repack", "tools.repack",
         "copy an HDF5 file, or a volume, with other chunks and another codec, checked to the last bit"),
        ("stage", "tools.stage",
         "copy the images of a bucket to a stage on a local disk, or say what a stage holds"),
        ("scan", "tools.scan",
         "find the images of a folder that a training could not read, and move them out of its way"),
        ("generate", "generation.cli",
         "make samples with a function, by all cores, and store them in an HDF5 file"),
        ("doctor", "tools.doctor.examination",
         "say whether this machine and environment are fit for input pipelines, and what to do where "
         "not"),
        ("profile", "tools.profiler",
         "run a training script for a while, unchanged: does it wait for data, for what, and what would "
         "help"),
    )
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: the arguments without the program's name.  If None, the arguments of this process are used.

    Returns:
        The exit code: 0 for success, 1 if the command found problems (outputs that differ, images that cannot
        be read), 2 for bad input, 130 if the command was interrupted.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    asked = [name for name in arguments[:1] if name in COMMANDS]
    for name in asked:
        arguments[1:] = COMMANDS[name].prepare(arguments[1:])
    args = _parsed(arguments, asked)

    from rich.console import Console

    from fastpipe.console import Progress, in_any_encoding, print_line

    errors = Console(stderr=True)
    try:
        output = Console() if sys.stdout.isatty() else Console(width=PLAIN_WIDTH)
        # The encoding of a profiled script's output must not change.
        printing = nullcontext() if args.command == "profile" else in_any_encoding()
        with printing, Progress(errors) as progress:
            code: int = COMMANDS[args.command].load().run(args, output, progress)
            return code
    except BrokenPipeError:
        return 0
    except (FastpipeError, OSError) as error:
        # ``print_line`` passes a Text, because rich turns words such as ":x:" in a string into emoji.
        print_line(errors, f"fastpipe {args.command}: {error}", style="red")
        return 2
    except KeyboardInterrupt:
        errors.print(f"fastpipe {args.command}: interrupted")
        return 130


class _Parser(argparse.ArgumentParser):
    """A parser that escapes control characters in its errors, because arguments may be any file names.

    Abbreviations of options are not accepted.  Otherwise ``--rest`` would mean ``--restore`` and move files.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{**options, "allow_abbrev": False})
        self.commands: dict[str, argparse.ArgumentParser] = {}

    def error(self, message: str) -> NoReturn:
        super().error(printable(message))


def _parsed(arguments: list[str], asked: Sequence[str]) -> argparse.Namespace:
    parser = _parser(asked)
    for name in arguments[:1]:
        if not name.startswith("-") and name not in COMMANDS:
            parser.error(f"there is no command {name!r}{_close(name, COMMANDS)}")
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        made = parser.commands[args.command]
        options = [option for action in made._actions for option in action.option_strings]
        made.error(f"unrecognized arguments: {' '.join(unknown)}{_close(unknown[0], options)}")
    return args


def _close(word: str, known: Iterable[str]) -> str:
    found = difflib.get_close_matches(word.partition("=")[0], list(known), 1)
    return f" (did you mean {found[0]}?)" if found else ""


def _parser(names: Sequence[str] = tuple(COMMANDS)) -> _Parser:
    """Return the parser of all commands.  Only the commands ``names`` get their options."""
    parser = _Parser("fastpipe", description="Make the input pipeline of a training script fast.")
    parser.add_argument("--version", action="version", version=f"fastpipe {fastpipe.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        about = f"{command.about[:1].upper()}{command.about[1:]}."
        made = parser.commands[name] = commands.add_parser(
            name, help=command.about, description=about, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        if name in names:
            made.epilog = getattr(command.load(), "EPILOG", None)
            command.load().add_arguments(made)
    return parser
