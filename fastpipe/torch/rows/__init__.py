"""Datasets whose samples are rows of arrays: a batch of them in the making, and its samples."""
