"""Bring bytes near: stores of objects, and copies of what is needed next on a local disk."""
