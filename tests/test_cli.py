"""The command ``fastpipe``: what all of its parts have in common."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scripts import ran

import fastpipe
from fastpipe import cli
from fastpipe.errors import OptionError


def instead(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Let ``verify`` raise an error."""

    def run(*arguments: object) -> int:
        raise error

    monkeypatch.setattr("fastpipe.tools.verify.run", run)


@pytest.mark.parametrize("arguments", [[], ["unknown"], ["--unknown"], ["verify"], [""]])
def test_wrong_use(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2 and "usage: fastpipe" in capsys.readouterr().err


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--help", "--version"):
        with pytest.raises(SystemExit) as stopped:
            cli.main([option])
        assert stopped.value.code == 0
    out = capsys.readouterr().out
    assert all(name in out for name in cli.COMMANDS) and f"fastpipe {fastpipe.__version__}" in out


@pytest.mark.parametrize(("error", "code", "said"), [
    (OptionError("wrong [red] :x: thing"), 2, "fastpipe verify: wrong [red] :x: thing\n"),
    (PermissionError(13, "Permission denied", "a.jpg"), 2,
     "fastpipe verify: [Errno 13] Permission denied: 'a.jpg'\n"),
    (KeyboardInterrupt(), 130, "fastpipe verify: interrupted\n"), (BrokenPipeError(), 0, ""),
], ids=["option", "system", "interrupt", "closed pipe"])  # fmt: skip
def test_an_error_is_one_line_and_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, error: BaseException, code: int, said: str
) -> None:
    instead(monkeypatch, error)
    assert cli.main(["verify", "folder"]) == code
    assert tuple(capsys.readouterr()) == ("", said)


def test_what_nobody_expects_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    instead(monkeypatch, ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        cli.main(["verify", "folder"])


def test_the_installed_command_is_this_one() -> None:
    text = (Path(__file__).resolve().parents[1] / "pyproject.toml").read_text()
    assert f'[project.scripts]\nfastpipe = "{cli.__name__}:{cli.main.__name__}"' in text


@pytest.mark.parametrize("module", ["fastpipe", "fastpipe.bench"])
def test_modules_that_run(module: str) -> None:
    done = ran("-m", module, "--help")
    assert done.returncode == 0 and done.stdout.startswith("usage: fastpipe"), done.stderr


def test_every_command_has_options_of_its_own() -> None:
    for name, command in cli.COMMANDS.items():
        parser = argparse.ArgumentParser(name)
        command.load().add_arguments(parser)
        assert len(parser._actions) > 1


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """A parser, and those of all commands and cases below it."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from parsers(below)


def test_options_are_taken_by_their_whole_names(capsys: pytest.CaptureFixture[str]) -> None:
    """``--rest`` does not move files back."""
    found = list(parsers(cli._parser()))
    assert len(found) > 15 and not any(one.allow_abbrev for one in found)
    for arguments in (
        ["scan", "--rest", "folder"], ["scan", "folder", "--quarant", "place"], ["stage", "--cle", "folder"],
        ["repack", "in.h5", "out.h5", "--forc"], ["generate", "x:f", "-n", "3", "--ou", "x.h5"],
        ["bench", "images", "--quic"], ["verify", "folder", "--see", "1"], ["profile", "--sec", "3", "x.py"],
        ["doctor", "--js", "x"], ["inspect", "x.h5", "--jso"],
    ):  # fmt: skip
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        assert ended.value.code == 2 and "unrecognized arguments" in capsys.readouterr().err


def test_a_scripts_own_options_are_its_own() -> None:
    given = ["--sec", "3", "--js", "x", "-m", "--", "--try"]
    for options, seconds in (([], 6.0), (["--seconds", "2"], 2.0)):
        args = cli._parser().parse_args(["profile", *options, "script.py", *given])
        assert args.arguments == given and args.seconds == seconds and args.json is None
        assert not args.is_module and not args.try_advice


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["profil", "train.py"], "there is no command 'profil' (did you mean profile?)"),
        (["nonsense"], "there is no command 'nonsense'"),
        (["verify", "folder", "--imges", "3"], "unrecognized arguments: --imges 3 (did you mean --images?)"),
    ],
)
def test_a_mistyped_word_is_asked_about(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main(arguments)
    errors = capsys.readouterr().err
    assert said in errors
    if arguments[0] in cli.COMMANDS:
        assert f"usage: fastpipe {arguments[0]}" in errors
