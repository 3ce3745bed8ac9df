"""Where bytes lie: buckets and file systems, their listings, and the stage on a local disk."""
