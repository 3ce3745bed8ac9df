"""``fastpipe doctor``: check that a machine and its environment are suitable for input pipelines."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from fastpipe.console import Progress
from fastpipe.core.files import is_url, write_output
from fastpipe.errors import OptionError
from fastpipe.stores.locations import Location
from fastpipe.tools.doctor import decoding as decoders
from fastpipe.tools.doctor import machine, packages, storage, stores
from fastpipe.tools.doctor.report import DoctorReport, Examined, Finding, problem, warning
from fastpipe.tools.folders import require_folder_of

# The cores are checked first, because the later checks load them.
CHECKS: dict[str, Callable[[Examined], Iterator[Finding]]] = {
    "cores": machine.check_cores, "storage": storage.check, "decoders": decoders.check,
    "stores": stores.check, "packages": packages.check, "memory": machine.check_memory,
    "limits": machine.check_limits, "threads": machine.check_threads, "caching": storage.check_cache,
}  # fmt: skip
_ORDER = ("decoders", "packages", "threads", "cores", "memory", "limits", "storage", "store", "cache folder")

EPILOG = """\
Checks decoders and their speed; torch, torchvision, TensorFlow, DALI and CUDA, and whether
they fit together; the cores and the memory that this process really has; /dev/shm, ulimits,
threads and fastpipe's cache folder. For FOLDER it reports the file system, and how fast
files are read from the page cache and from the disk; for a URL, the store's latency, and how
many parallel requests that needs. It only reads. Up to some hundred MiB of FOLDER's files
are dropped from the page cache first.

Credentials come from the environment or a credentials file, not from options.

exit codes: 0 no problem (there may be warnings), 1 a problem, 2 bad input,
130 interrupted
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("target", metavar="FOLDER|URL", nargs="?", default=None,
        help="your data: a folder, or a URL such as s3://bucket/train")  # fmt: skip
    add("--json", type=Path, default=None, metavar="FILE", help="write everything there, as JSON")
    add("--endpoint-url", default=None, metavar="URL", help="endpoint of a store that is not Amazon's")
    add("--anon", action="store_true", help="ask without credentials")


def run(args: argparse.Namespace, console: Console, progress: Progress) -> int:
    require_folder_of(args.json)
    options = {name: value for name in ("endpoint_url", "anon") if (value := getattr(args, name))}
    report = examine(args.target, storage_options=options, on_progress=progress.now)
    progress.stop()
    report.show(console)
    if args.json is not None:
        write_output(args.json, report.json())
        progress.done(f"wrote {args.json}")
    return int(report.count("problem") > 0)


def examine(
    target: str | os.PathLike[str] | None = None, *, storage_options: Mapping[str, Any] | None = None,
    on_progress: Callable[[str], object] = lambda _: None,
) -> DoctorReport:  # fmt: skip
    """Check this machine, and also the folder or store ``target`` if it is not None.

    Nothing is written.  Neither torch nor TensorFlow is imported in this process.
    """
    examined = _examined(target, dict(storage_options or {}))
    begun = time.monotonic()
    found: list[Finding] = []
    for topic, check in CHECKS.items():
        on_progress(f"examining {topic}")
        try:
            found.extend(check(examined))  # extend keeps the findings before a failure
        except ImportError as error:
            found.append(problem(topic, f"{type(error).__name__}: {error}", "install what is missing"))
        except Exception as error:
            remedy = "check this by hand; if nothing is wrong, please report it as a fault of fastpipe"
            found.append(warning(topic, f"not examined: {type(error).__name__}: {error}", remedy))
    found.sort(key=lambda one: _ORDER.index(one.topic) if one.topic in _ORDER else len(_ORDER))
    return DoctorReport(tuple(found), examined.name, time.monotonic() - begun)


def _examined(target: str | os.PathLike[str] | None, options: dict[str, Any]) -> Examined:
    if target is not None and is_url(target):
        place = Location.of(target).root  # raises an error if the URL contains credentials
        return Examined(url=place, name=place, storage_options=options)
    if options:
        raise OptionError("storage_options are for the URL of a store, such as s3://bucket/train")
    if target is None:
        return Examined()
    folder = os.fspath(target)
    if not os.path.exists(folder):
        raise FileNotFoundError(2, "No such file or folder", folder)
    return Examined(folder=folder, name=os.fsencode(folder).decode("utf-8", "backslashreplace"))
