"""Images whose decoding is timed, and whose failures are told from those of a transform."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns
from typing import Any, TypeVar

from fastpipe._nvtx import ranged
from fastpipe.engine.bad import Item, is_of_machine
from fastpipe.protocols import EncodedImage, ReducedImage
from fastpipe.types import Box, Size, UInt8Array

__all__ = ["UnreadableError", "WatchedImage", "judged"]

_T = TypeVar("_T")


class UnreadableError(Exception):
    """Reading or decoding failed, as opposed to transforming; the cause says how.

    Args:
        item: what could not be read, where it is one of several parts of the sample.
    """

    def __init__(self, item: Item | None = None) -> None:
        super().__init__()
        self.item = item


class WatchedImage:
    """An opened image whose decoding is timed and whose failures are told from a transform's."""

    def __init__(self, image: EncodedImage) -> None:
        self._image = image
        self.size: Size = image.size
        self.nanoseconds = 0

    @ranged("decode")
    def timed(self, decode: Callable[..., _T], *arguments: Any) -> _T:
        """Call what decodes the image."""
        start = perf_counter_ns()
        try:
            return decode(*arguments)
        except Exception as error:
            raise judged(error) from error
        finally:
            self.nanoseconds += perf_counter_ns() - start

    def region(self, box: Box) -> UInt8Array:
        return self.timed(self._image.region, box)

    def info(self) -> dict[Any, Any]:
        try:
            return self._image.info()
        except Exception as error:
            raise judged(error) from error

    def rows(self, top: int, count: int) -> UInt8Array | None:
        return self.timed(self._image.rows, top, count)

    def reduced(self, factor: int) -> ReducedImage | None:
        image = self._image.reduced(factor)
        return None if image is None else _WatchedRows(self, image)

    def encoded(self) -> bytes | None:
        return self._image.encoded()

    def give(self, box: Box, pixels: UInt8Array) -> None:
        self._image.give(box, pixels)

    def pil(self) -> Any:
        return self.timed(self._image.pil)


class _WatchedRows:
    """A reduced image that is watched like the image that it is of."""

    def __init__(self, watched: WatchedImage, image: ReducedImage) -> None:
        self._watched, self._image = watched, image
        self.size = image.size

    def rows(self, count: int) -> UInt8Array | None:
        return self._watched.timed(self._image.rows, count)


def judged(error: Exception) -> Exception:
    """What to raise for an error of reading or decoding: that the file is bad, or the error."""
    return error if is_of_machine(error) else UnreadableError()
