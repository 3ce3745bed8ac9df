"""What runs in the process of a peer: one file for each library, and the protocol."""
