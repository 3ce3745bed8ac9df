"""``fastpipe scan``: which samples a training could not read, and what can be done about them."""
