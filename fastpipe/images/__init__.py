"""Batches of images, described here and made by the native core."""
