"""What ``fastpipe inspect`` and ``fastpipe repack`` do with volumes."""
