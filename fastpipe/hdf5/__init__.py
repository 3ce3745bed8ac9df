"""HDF5 datasets, read in threads: the library says where the bytes are, and they are read without it."""
