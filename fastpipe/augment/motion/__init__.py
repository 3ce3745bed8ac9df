"""Augmentations of motion, (N, T, J, C): frames of joints with their coordinates."""
