"""Samples that are parts of arrays in files: rows of HDF5 datasets, patches of volumes.  Of no framework."""
