"""Other libraries doing the same job, each in a process of its own.

TensorFlow and DALI start thread pools and change process-wide settings when imported, so
they stay out of the process that measures torch.  The child (`peer_child`) sleeps on its
standard input while others are measured.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastpipe.bench.data import Photos
from fastpipe.bench.runner import ContenderError

__all__ = ["PEERS", "Peer", "PeerRow", "installed"]


@dataclass(frozen=True)
class Peer:
    """A library to compare with.

    Attributes:
        key: its name in the JSON file, and for the child.
        label: its name in tables.
        module: the module that is there when it is installed.
        install: how to install it.
        note: in what its output is not that of the replaced loader.
    """

    key: str
    label: str
    module: str
    install: str
    note: str


PEERS = (
    Peer(
        "dali",
        "DALI, CPU pipeline",
        "nvidia.dali",
        "pip install nvidia-dali-cuda130",
        "own crops and resampling",
    ),
    Peer(
        "tfdata",
        "tf.data, decode_and_crop_jpeg",
        "tensorflow",
        "pip install tensorflow-cpu",
        "NHWC; no antialiasing",
    ),
)


def installed(peer: Peer) -> bool:
    """Whether the peer's package is there; it is not imported."""
    try:
        return importlib.util.find_spec(peer.module) is not None
    except ModuleNotFoundError:
        return False


class PeerRow:
    """A `Contender` in a child process.

    Args:
        peer: which library.
        photos: the photos to read.
        batch_size: images in a batch.
        threads: how many threads the library may use.

    Raises:
        ContenderError: the child does not start, or its first batch is not what it should be.
    """

    workers = 0

    def __init__(self, peer: Peer, photos: Photos, batch_size: int, threads: int) -> None:
        self.key, self.peer, self.chunk = peer.key, peer, batch_size
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by `close`)
        self._child: subprocess.Popen[str] | None = subprocess.Popen(
            [sys.executable, "-m", "fastpipe.bench.peer_child", peer.key],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            # No GPU: the rows compare processors.
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"},
        )
        try:
            self.first_batch = self._ask(
                {
                    "files": photos.files,
                    "labels": photos.labels,
                    "batch_size": batch_size,
                    "threads": threads,
                }
            )
        except BaseException:
            self.close()
            raise

    def measure(self, images: int) -> float:
        """Let the child handle so many images; return the seconds it counted."""
        return float(self._ask({"batches": images // self.chunk})["seconds"])

    def close(self) -> None:
        """End the child; it leaves by itself when its standard input is closed."""
        child, self._child = self._child, None
        if child is None:
            return
        for stream in (child.stdin, child.stdout):
            if stream is not None:
                # It may have died with words of ours still in the pipe.
                with contextlib.suppress(OSError):
                    stream.close()
        try:
            child.wait(timeout=5)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        self._stderr.close()

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """Send one line of JSON, read one."""
        if self._child is None or self._child.stdin is None or self._child.stdout is None:
            raise ContenderError(f"{self.peer.label} is not running")
        try:
            self._child.stdin.write(json.dumps(question) + "\n")
            self._child.stdin.flush()
            answer = self._child.stdout.readline()
        except OSError:
            answer = ""
        if not answer:
            raise ContenderError(f"{self.peer.label} stopped: {self._last_words()}")
        decoded: dict[str, Any] = json.loads(answer)
        if "error" in decoded:
            raise ContenderError(f"{self.peer.label}: {decoded['error']}")
        return decoded

    def _last_words(self) -> str:
        """The last line that the child wrote to its standard error."""
        self._stderr.seek(0)
        lines: Sequence[str] = [line for line in self._stderr.read().splitlines() if line.strip()]
        return lines[-1].strip() if lines else "no message"
