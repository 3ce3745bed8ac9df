"""Code that runs in the process of a peer: one file for each library, and the protocol.

These files import each other and ``fastpipe.bench.samples``, nothing else of fastpipe: they also run in
environments that lack what fastpipe needs.
"""
