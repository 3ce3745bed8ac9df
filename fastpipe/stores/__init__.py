"""Remote files of samples: clients of stores, and the stage on a local disk."""
