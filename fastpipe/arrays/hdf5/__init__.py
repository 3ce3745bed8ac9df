"""Samples that are rows of HDF5 datasets."""
