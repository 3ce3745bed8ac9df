"""Decoded things that are kept: bounded in bytes, in memory or on disk, shared by whoever decodes."""
