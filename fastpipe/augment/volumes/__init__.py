"""Augmentations of volumes, (N, C, D, H, W)."""
