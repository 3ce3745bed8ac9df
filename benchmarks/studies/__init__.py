"""Measurements that are no rates."""
