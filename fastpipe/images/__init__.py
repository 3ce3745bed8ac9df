"""Batches of images: described here, made by the native core."""
