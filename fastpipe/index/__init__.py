"""Which samples exist, and in which order an epoch visits them."""
