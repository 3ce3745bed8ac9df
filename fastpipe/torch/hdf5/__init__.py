"""``FastHDF5Dataset``: rows of HDF5 datasets as samples, a batch at a time."""
