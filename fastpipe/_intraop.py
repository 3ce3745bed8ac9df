"""torch's own threads, kept out of the decoding threads.

torch splits an operation on a large tensor among threads: in every thread that calls it, among as
many as the machine has cores.  Decoding threads occupy the cores already, so that each of the
user's transforms in them would only wait for its helpers.  torch's worker processes do without
for the same reason.
"""

from __future__ import annotations

import torch

from fastpipe._extras import require_threadpoolctl

__all__ = ["do_without_helpers"]


# Found here, where a failure is an error of the import, and not in a decoding thread.
_openmp = require_threadpoolctl("torch").ThreadpoolController().select(user_api="openmp")


def do_without_helpers() -> None:
    """Run torch's operations of this thread in this thread alone; other threads are not affected."""
    torch.get_num_threads()  # sets what is the default for this thread, which would else come later
    # torch.set_num_threads would count for all threads that start later; OpenMP's own setting is
    # the calling thread's.
    _openmp.limit(limits=1)
