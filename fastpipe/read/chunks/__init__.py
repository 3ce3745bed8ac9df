"""What formats in chunks have in common: C libraries that undo compression, and memory for it."""
