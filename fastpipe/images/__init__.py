"""Batches of images: Python describes a batch, and the native core decodes and converts its images."""
