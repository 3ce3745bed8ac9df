"""Which decoders there are, and how fast they are here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastpipe.tools.doctor.child import ask
from fastpipe.tools.doctor.report import Examined, Finding, ok, problem, warning

_TOPIC = "decoders"
_PATIENCE_S = 60.0
_CODE = """
from fastpipe.tools.doctor.decoding import measure
answer(measure(_asked))
"""
_INSTALL = "pip install 'fastpipe[image]'"
_CLEARLY = 1.2  # times as fast, beyond what two short measurements differ by


def check(examined: Examined) -> Iterator[Finding]:
    answer = ask(_CODE, list(examined.photos), seconds=_PATIENCE_S)
    if answer.value is None:
        yield problem(_TOPIC, f"decoders cannot be used: {_first(answer.why)}", _INSTALL)
        return
    found: dict[str, Any] = answer.value
    rates: dict[str, float] = {}
    for name, one in found["decoders"].items():
        if "rate" in one:
            rates[name] = one["rate"]
            yield ok(_TOPIC, f"{one['what']}: {one['rate']:,.0f} images/s a core")
        elif name == "pillow":
            yield problem(_TOPIC, f"Pillow: {one['why']}", _INSTALL)
        else:
            yield warning(_TOPIC, f"{name} cannot be used: {_first(one['why'])}", _INSTALL)
    yield ok(_TOPIC, f"measured on {found['of']}")
    chosen = found["chosen"]
    examined.images_s = rates.get(chosen)
    if chosen in rates:
        yield from _choice(chosen, rates, found["used"])


def _choice(chosen: str, rates: dict[str, float], used: str) -> Iterator[Finding]:
    best = max(rates, key=lambda name: rates[name])
    why = {
        "libjpeg-turbo": "it decodes only the part of an image that a crop needs, bit for bit as Pillow does",
        "pillow": "the installed Pillow has plugins or pixels of its own",
    }[chosen]
    yield ok(_TOPIC, f"fastpipe uses: {used}. Of JPEGs: {why}")
    if rates[best] > _CLEARLY * rates[chosen]:
        yield warning(
            _TOPIC,
            f"{best} decodes {rates[best] / rates[chosen]:.1f} times as many of these images a second",
            f"FastImageFolder(…, decode=Decode(backend={best!r})), and fastpipe bench to see the whole",
        )


def _first(why: str) -> str:
    return why.rpartition("MissingDependencyError: ")[2].partition(" Install it with:")[0]
