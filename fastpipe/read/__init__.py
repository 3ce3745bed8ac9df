"""Bytes to arrays: files, and the decoders that turn encoded images into pixels."""
