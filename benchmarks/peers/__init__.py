"""Other libraries doing the same job, each in a process of its own."""
