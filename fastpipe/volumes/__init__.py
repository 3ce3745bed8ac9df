"""Patches of arrays that are larger than memory, whatever they are stored in."""
