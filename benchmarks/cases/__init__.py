"""The cases of ``fastpipe bench`` with peers, studies and acceptance figures."""
