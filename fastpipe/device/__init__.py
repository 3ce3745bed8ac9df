"""Batches on their way to the accelerator."""
