"""Shared code of all kinds of data."""
