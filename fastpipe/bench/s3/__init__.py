"""The case ``s3``: an image folder in a bucket, from its first epoch on.

It starts an S3 server on this machine (Ceph's gateway), and a proxy before it that lets each answer wait as
one from far away does.  ``bucket.py`` is what is read, ``rows.py`` the loaders in this process, ``peers.py``
those in others, ``mounts.py`` the bucket as a folder, ``fetching.py`` objects without their pixels.
``stall.py``, ``refetched.py`` and ``cpu.py`` measure what is no rate.
"""
