"""Samples that are patches of volumes."""
