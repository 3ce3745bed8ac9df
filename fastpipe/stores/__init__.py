"""Clients of stores, which contain remote files, and the stage, which keeps copies on a local disk."""
