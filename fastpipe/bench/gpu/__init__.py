"""The case ``gpu``: decoders, training steps and augmentation on a CUDA device, in a few minutes.

==============  ==================================================================
``case``        its options, its check, its rounds, its result
``sections``    the sections: their rows, and what makes them
``sizes``       how much there is of everything, on a GPU and for a look without one
``budget``      windows and rounds that end in time
``device``      the device: is it there, what it is, the part of a window that it computes
``check``       are the pixels of each decoder those of Pillow?
``decoding``    the rows that decode, and what loaders the training rows have
``peers``       the rows that decode with other libraries, each in its own process
``training``    steps, and the rows that make them
``augmenting``  one batch, again and again, on the processor and on the device
``patches``     patches of a volume, augmented on the processor or on the device, and a step on each
``guarding``    rows that leave when they fail
==============  ==================================================================
"""

from __future__ import annotations

__all__: list[str] = []
