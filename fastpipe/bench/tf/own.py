"""The datasets of fastpipe's that replace those of scripts."""

from __future__ import annotations

from typing import Any, Literal

import fastpipe
from fastpipe.bench.tf.data import NUMBERS, SIDE, Setting

__all__ = ["crops", "folder", "modalities"]


def crops(
    setting: Setting,
    *,
    is_shuffled: bool,
    cache: Literal["off", "ram", "disk"] = "off",
    engine: Literal["threads", "graph"] = "threads",
) -> Any:
    """One image of each row, with its box.

    Args:
        setting: the samples.
        is_shuffled: whether each epoch has an order of its own.
        cache: where samples are kept.
        engine: as of ``image_dataset``.
    """
    table = setting.crops
    return fastpipe.tf.image_dataset(
        {"file": list(table.files), "label": table.labels}, boxes=table.boxes["image"], image_size=SIDE,
        batch_size=setting.batch_size, shuffle=is_shuffled, seed=0, cache=setting.cache(cache), engine=engine,
    )  # fmt: skip


def modalities(setting: Setting, *, is_shuffled: bool, cache: Literal["off", "ram", "disk"] = "off") -> Any:
    """Four images of each row, and numbers.

    Args:
        setting, is_shuffled, cache: as of `crops`.
    """
    table = setting.several
    first, second = table.numbers.T
    return fastpipe.tf.image_dataset(
        {"file": list(table.files), "label": table.labels, "first": first, "second": second},
        modalities={name: {"boxes": boxes} for name, boxes in table.boxes.items()},
        tabular={NUMBERS: ["first", "second"]}, image_size=SIDE, batch_size=setting.batch_size,
        shuffle=is_shuffled, seed=0, cache=setting.cache(cache),
    )  # fmt: skip


def folder(setting: Setting, *, is_shuffled: bool, cache: Literal["off", "ram", "disk"] = "off") -> Any:
    """A folder, at the defaults of ``image_dataset_from_directory``.

    Args:
        setting, is_shuffled, cache: as of `crops`.
    """
    return fastpipe.tf.image_dataset(
        str(setting.folder), batch_size=setting.batch_size, shuffle=is_shuffled, seed=0, verbose=False,
        cache=setting.cache(cache),
    )  # fmt: skip
