"""What is read how, in words."""

from __future__ import annotations

import math

from fastpipe._sizes import in_bytes
from fastpipe.arrays.form import Form
from fastpipe.read.hdf5.files import SampleFiles
from fastpipe.read.hdf5.layout import Layout

__all__ = ["HDF5Plan"]


class HDF5Plan:
    """What an HDF5 dataset does with its files.  ``print`` it.

    Attributes:
        lines: one for each dataset, and one for the decoded chunks.

    Args:
        form: what a sample is made of.
        files: where samples are.
        kept: where decoded chunks are kept, in words.
    """

    def __init__(self, form: Form, files: SampleFiles, kept: str) -> None:
        self.lines = [
            f"{name}: {files.sample_shape(number)} {layout.dtype}  →  {_how(files, number)}"
            for number, (name, layout) in enumerate(zip(form.names, files.layouts, strict=True))
        ]
        self.lines.append(f"decoded chunks  →  {kept}")

    def __repr__(self) -> str:
        return "HDF5Plan(\n" + "".join(f"  {line}\n" for line in self.lines) + ")"


def _how(files: SampleFiles, number: int) -> str:
    layouts = [file.layouts[number] for file in files.files]
    slow = [layout for layout in layouts if layout.kind == "h5py"]
    if slow:
        some = f" in {len(slow)} of {len(layouts)} files" if len(slow) < len(layouts) else ""
        return f"through h5py, one thread at a time{some}, as {slow[0].why}"
    return _direct(layouts[0], files.files[0].sample_dims)


def _direct(layout: Layout, sample_dims: int) -> str:
    if not layout.filters:
        return "read row by row, in threads"
    samples = math.prod(layout.chunk[:sample_dims])
    nbytes = layout.dtype.itemsize * math.prod(layout.chunk)
    filters = " and ".join(step.name for step in layout.filters)
    return f"chunks of {samples} samples ({in_bytes(nbytes)}; {filters}), decoded in threads"
