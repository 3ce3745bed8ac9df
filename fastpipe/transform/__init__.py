"""Sample to sample: a ``Compose`` becomes a plan; a plan draws parameters and applies them."""
