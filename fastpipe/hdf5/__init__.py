"""HDF5 datasets, read in threads: the library locates the bytes, which are then read without it."""
