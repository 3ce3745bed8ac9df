"""What an examination finds: one line each, and what to do about those that are not as they should be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from fastpipe.errors import OptionError

__all__ = ["Examined", "Finding", "State", "ok", "problem", "warning"]

State = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        topic: what it belongs to: ``"decoders"``, ``"memory"`` and so on.
        state: ``"ok"``; ``"warning"``: it could be faster, or more; ``"problem"``: something will not work.
        text: what was found.
        remedy: what to do; empty where all is well.

    Raises:
        OptionError: something is not well, and there is no remedy.

    >>> Finding("memory", "ok", "20 GiB are free").state
    'ok'
    """

    topic: str
    state: State
    text: str
    remedy: str = ""

    def __post_init__(self) -> None:
        if (self.state == "ok") != (not self.remedy):
            raise OptionError(f"a finding has a remedy unless it is ok, got {self.state!r}, {self.remedy!r}")


def ok(topic: str, text: str) -> Finding:
    """A finding where all is well."""
    return Finding(topic, "ok", text)


def warning(topic: str, text: str, remedy: str) -> Finding:
    """A finding of something that could be better."""
    return Finding(topic, "warning", text, remedy)


def problem(topic: str, text: str, remedy: str) -> Finding:
    """A finding of something that will not work."""
    return Finding(topic, "problem", text, remedy)


@dataclass
class Examined:
    """What is examined, and what the checks tell each other.

    Attributes:
        folder: a folder, or file, of this machine; empty without one.
        name: what is examined, for people.
        url: of a store; empty without one.
        storage_options: for the store.
        photos: JPEG files of the folder.
        images_s: that a core decodes in a second; None where that was not measured.
        disk_files_s: files of the folder that its disk gives in a second; None where that was not measured.
        torch: what torch's process said of it; None without torch.
    """

    folder: str = ""
    name: str = ""
    url: str = ""
    storage_options: Mapping[str, Any] = field(default_factory=dict)
    photos: tuple[str, ...] = ()
    images_s: float | None = None
    disk_files_s: float | None = None
    torch: Mapping[str, Any] | None = None
