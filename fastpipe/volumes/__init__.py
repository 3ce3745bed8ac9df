"""Read patches of arrays that are larger than memory, in any supported storage format."""
