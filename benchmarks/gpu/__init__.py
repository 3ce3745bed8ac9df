"""The case ``gpu``: decoders, training steps and augmentation on a CUDA device, in a few minutes."""
