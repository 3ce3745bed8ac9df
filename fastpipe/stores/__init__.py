"""Where samples' files lie: clients of stores, and the stage on a local disk."""
