"""Batches of images, which Python describes and the native core decodes, resizes and converts."""
