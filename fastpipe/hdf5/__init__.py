"""Read HDF5 datasets in threads: the HDF5 library locates the bytes, and fastpipe reads the bytes itself."""
