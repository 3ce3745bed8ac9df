"""``FastPatchDataset``: patches of volumes as samples, a batch at a time."""
