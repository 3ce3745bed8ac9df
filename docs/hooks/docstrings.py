"""Docstrings as Markdown: examples and code in fences, names as links."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|func|meth|mod|attr|data|exc):`~?([\w.]+)`")
_EXAMPLE = re.compile(r"^([ ]*)>>> .*(?:\n\1\S.*|\n[ ]*\.\.\..*)*", re.M)


class Markdown(griffe.Extension):
    """When a package was read, what only reStructuredText knows in its docstrings becomes Markdown."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        _convert(pkg)


def as_markdown(text: str, resolve: Any = lambda name: name) -> str:
    """A docstring's text as Markdown.

    Args:
        text: the docstring, without indentation.
        resolve: a function that makes a name's whole path.
    """
    text = _ROLE.sub(lambda found: _link(found[1], resolve(found[1])), text)
    # Code follows after a colon, or after nothing.
    text = re.sub(r"::$", ":", re.sub(r"^[ ]*::\n", "", text, flags=re.M), flags=re.M)
    # Several arguments with one description, and errors that are another function's.
    text = re.sub(r"^( {4}[a-z_, ]+),\n +(?=[a-z_, ]+: )", r"\1, ", text, flags=re.M)
    text = re.sub(r"^Raises:\n +As (.+)\.$", r"Raises the errors of \1.", text, flags=re.M)
    return _EXAMPLE.sub(lambda found: f"{found[1]}```pycon\n{found[0]}\n{found[1]}```", text)


def _link(name: str, path: str) -> str:
    """A name as a link to where it is described, if it is."""
    return f'<autoref identifier="{path}" optional><code>{name}</code></autoref>'


def _convert(one: griffe.Object) -> None:
    """Convert the docstrings of an object and of all that is defined in it."""

    def resolve(name: str) -> str:
        try:
            return one.resolve(name)
        except griffe.NameResolutionError:
            return name

    if one.docstring is not None:
        one.docstring.value = as_markdown(one.docstring.value, resolve)
    for member in one.members.values():
        if not member.is_alias:
            _convert(member)
