"""Other libraries doing the same job, each in a process of its own.

They start thread pools and change process-wide settings when imported, so they stay out of the
process that measures torch; some need an environment of their own besides.  The child
(`child`) sleeps on its standard input while others are measured.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fastpipe.bench.data import Photos
from fastpipe.bench.images import MEAN, SIDE, STD
from fastpipe.bench.results import RowInfo
from fastpipe.bench.runner import Contender, ContenderError

CHILD = Path(__file__).with_name("child.py")
CHECKOUT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Peer:
    """A library to compare with.

    Attributes:
        key: its name in the JSON file.
        label: its name in tables.
        source: which file of `children` runs it.
        install: the command that installs it.
        module: the module that is there when it is installed in this environment.
        environment: for one that needs an environment of its own, the environment's name.
        output: what its batches hold.
        note: in what its output is not that of the replaced loader.
        options: what tells rows of the same library apart.
        is_on_gpu: whether it may see the GPUs.
    """

    key: str
    label: str
    source: str
    install: str
    module: str = ""
    environment: str = ""
    output: Literal["float32", "uint8"] = "float32"
    note: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    is_on_gpu: bool = False

    @property
    def variable(self) -> str:
        """The environment variable that names the interpreter of its own environment."""
        return f"FASTPIPE_{self.environment.upper().replace('-', '_')}_PYTHON"


def _ffcv(mode: str, label: str, output: Literal["float32", "uint8"], note: str) -> Peer:
    """A row of FFCV."""
    return Peer(
        f"ffcv-{mode}-{output}",
        f"FFCV, {label}" + (", uint8" if output == "uint8" else ""),
        "ffcv",
        "make peers-ffcv",
        environment="ffcv",
        output=output,
        note=note,
        options={"mode": mode, "shorter_side": 256},
    )


# For an answer: converting data takes minutes, and some libraries hang now and then.
_PATIENCE_S = 900.0
_FFCV_NOTE = "own crops, resampling by area"

PEERS = (
    Peer(
        "dali",
        "DALI, CPU pipeline",
        "dali",
        "pip install nvidia-dali-cuda130",
        "nvidia.dali",
        note="own crops and resampling",
    ),
    Peer(
        "tfdata",
        "tf.data, decode_and_crop_jpeg",
        "tfdata",
        "pip install tensorflow-cpu",
        "tensorflow",
        note="NHWC; no antialiasing",
    ),
    Peer(
        "spdl",
        "SPDL, FFmpeg filters",
        "spdl",
        "pip install spdl, and apt-get install ffmpeg",
        "spdl.io",
        note="own crops on even pixels, FFmpeg's decoder and resampling",
    ),
    Peer(
        "litdata",
        "LitData, StreamingDataLoader",
        "litdata",
        "pip install litdata",
        "litdata",
        note="torchvision's transforms on tensors; shuffled within chunks; photos turned by EXIF",
    ),
    Peer(
        "pillow-simd",
        "ImageFolder + DataLoader, Pillow-SIMD",
        "pillow_simd",
        "make peers-pillow-simd",
        environment="pillow-simd",
        note="the replaced loader, num_workers = cores",
    ),
    _ffcv("jpg", "JPEG mode", "float32", f"{_FFCV_NOTE}, inexact DCT"),
    _ffcv("jpg", "JPEG mode", "uint8", f"{_FFCV_NOTE}, inexact DCT"),
    _ffcv("raw", "raw 256 px", "float32", f"no JPEG to decode; {_FFCV_NOTE}"),
    _ffcv("raw", "raw 256 px", "uint8", f"no JPEG to decode; {_FFCV_NOTE}"),
)


def interpreter(peer: Peer, folders: Sequence[Path] | None = None) -> str | None:
    """The Python that has the peer, or ``None``; nothing is imported.

    Args:
        peer: which library.
        folders: where an environment of its own may lie, if its variable is not set: by default the
            current folder and that of the checkout.
    """
    if not peer.environment:
        try:
            return sys.executable if importlib.util.find_spec(peer.module) is not None else None
        except ModuleNotFoundError:
            return None
    named = os.environ.get(peer.variable)
    places = [Path(folder) / f".venv-{peer.environment}" / "bin" / "python" for folder in _here(folders)]
    candidates = [Path(named).expanduser()] if named else places
    # Not resolved: a virtual environment's python is a link, and known by where it lies.
    return next((str(place.absolute()) for place in candidates if place.is_file()), None)


def _here(folders: Sequence[Path] | None) -> Sequence[Path]:
    """Return the folders that may have environments."""
    return (Path.cwd(), CHECKOUT) if folders is None else folders


class ChildRow(Contender):
    """A `Contender` in a child process.

    Args:
        peer: which library.
        python: the interpreter that has it.
        job: the first line for the child, to which the folder that it may write to is added.
        batch_size: samples in a batch.
        threads: how many threads or processes the library may use.

    Attributes:
        first_batch: what the child answered to the job.

    Raises:
        ContenderError: the child does not start, or its first batch is not what it should be.
    """

    def __init__(
        self, peer: Peer, python: str, job: Mapping[str, Any], batch_size: int, threads: int
    ) -> None:
        self.key, self.peer = peer.key, peer
        # Some give batches in bursts, one from each worker: a measurement is a number of whole bursts.
        self.chunk = batch_size * threads
        self._batch_size = batch_size
        # What a peer converts its data to; the child may be killed, so it is removed here.
        self._scratch = tempfile.TemporaryDirectory(prefix="fastpipe-bench-", ignore_cleanup_errors=True)
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by `close`)
        self._child: subprocess.Popen[str] | None = None
        try:
            self._child = subprocess.Popen(
                [python, str(CHILD), peer.source],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                text=True,
                env=_environment(peer, self._scratch.name),
            )
            self.first_batch = self._ask({**job, "scratch": self._scratch.name})
        except OSError as error:
            self.close()
            raise ContenderError(f"{peer.label} does not start: {error.strerror}") from None
        except BaseException:
            self.close()
            raise

    def measure(self, count: int) -> float:
        """Let the child handle so many samples; return the seconds it counted."""
        return float(self._ask({"batches": count // self._batch_size})["seconds"])

    def close(self) -> None:
        """End the child; it leaves by itself when its standard input is closed."""
        child, self._child = self._child, None
        if child is not None:
            self._end(child)
        self._stderr.close()
        self._scratch.cleanup()

    def _end(self, child: subprocess.Popen[str]) -> None:
        """Close the pipes and wait."""
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

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """Send one line of JSON, read one."""
        child, is_late = self._child, threading.Event()
        if child is None or child.stdin is None or child.stdout is None:
            raise ContenderError(f"{self.peer.label} is not running")

        def end() -> None:
            is_late.set()
            child.kill()

        limit = threading.Timer(_PATIENCE_S, end)
        limit.start()
        try:
            child.stdin.write(json.dumps(question) + "\n")
            child.stdin.flush()
            answer = child.stdout.readline()
        except OSError:
            answer = ""
        finally:
            limit.cancel()
            limit.join()
        if not answer and is_late.is_set():
            raise ContenderError(
                f"{self.peer.label} did not answer for {_PATIENCE_S:g} s, and was ended: {self._last_words()}"
            )
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


class PeerRow(ChildRow):
    """A peer that loads photos.

    Args:
        peer: which library.
        python: the interpreter that has it.
        photos: the photos to read.
        batch_size: images in a batch.
        threads: how many threads or processes the library may use.
        side: height and width of the images that it makes.

    Raises:
        ContenderError: the child does not start, or its first batch is not what it should be.
    """

    def __init__(
        self, peer: Peer, python: str, photos: Photos, batch_size: int, threads: int, side: int = SIDE
    ) -> None:
        self._photos = photos
        job = _job(peer, photos, batch_size, threads, side)
        super().__init__(peer, python, job, batch_size, threads)

    @property
    def info(self) -> RowInfo:
        """The row, with what the child told."""
        peer, told = self.peer, self.first_batch
        seconds, made = told.get("prepared_s"), told.get("prepared_bytes")
        size = made / self._photos.bytes if made else None
        notes = [peer.note, told.get("note", "")]
        if seconds is not None and size is not None:
            notes.append(f"converted in {seconds:.0f} s to {size:.1f}× the bytes")
        return RowInfo(
            peer.key, peer.label, "peer", None, peer.output, "; ".join(note for note in notes if note),
            versions=told.get("versions"), prepared_s=None if seconds is None else round(seconds, 2),
            prepared_size=None if size is None else round(size, 3),
        )  # fmt: skip


def _job(peer: Peer, photos: Photos, batch_size: int, threads: int, side: int) -> dict[str, Any]:
    """The first line for the child."""
    return {
        "folder": str(photos.folder),
        "indices": photos.indices,
        "files": photos.files,
        "labels": photos.labels,
        "batch_size": batch_size,
        "threads": threads,
        "side": side,
        "mean": MEAN,
        "std": STD,
        "output": peer.output,
        "options": dict(peer.options),
    }


def _environment(peer: Peer, scratch: str) -> dict[str, str]:
    """The child's environment variables; its temporary files go where the parent removes them."""
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "TMPDIR": scratch}
    if not peer.is_on_gpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""  # the rows compare processors
    if peer.environment:
        # Packages of this environment must not hide those of the peer's.
        for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"):
            environment.pop(name, None)
    return environment
