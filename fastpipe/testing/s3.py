"""An S3 server with buckets, for tests and benchmarks: one that is started here, or one that is there."""

from __future__ import annotations

import itertools
import os
import tempfile
import uuid
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from fastpipe.core.extras import require
from fastpipe.testing.delay_proxy import DelayProxy, Faults
from fastpipe.testing.s3_server import S3Server, missing_programs

__all__ = ["S3", "S3Missing", "S3Proxy"]

_ENDPOINT = "FASTPIPE_S3_ENDPOINT"


class S3Missing(Exception):  # noqa: N818 - a state of the machine
    """There is no server, and none can be started; the message says what to do."""


class S3Proxy(DelayProxy):
    """A proxy before the server.

    Attributes:
        options: ``storage_options`` through it.
    """

    def __init__(self, port: int, faults: Faults, options: Mapping[str, Any]) -> None:
        super().__init__(port, faults)
        self.options: dict[str, Any] = dict(options)

    def __enter__(self) -> S3Proxy:
        super().__enter__()
        self.options["endpoint_url"] = f"http://127.0.0.1:{self.port}"
        return self


class S3:
    """A server, from ``__enter__`` to ``__exit__``.

    ``$FASTPIPE_S3_ENDPOINT`` names one that is there already (``http://host:port``; with AWS_ACCESS_KEY_ID
    and AWS_SECRET_ACCESS_KEY); else Ceph's programs are started, where this machine has them.

    Attributes:
        endpoint: its address.
        options: ``storage_options`` as s3fs takes them.
        server: the server, if it was started here.
        folder: where it has files then; else empty.

    Raises:
        S3Missing: there is none.
    """

    def __init__(self) -> None:
        self.server: S3Server | None = None
        self.endpoint = os.environ.get(_ENDPOINT, "").rstrip("/")
        self.options: dict[str, Any] = {}
        self.folder = ""
        self._names = itertools.count()
        self._stack = ExitStack()

    def __enter__(self) -> S3:
        with ExitStack() as stack:
            key, secret = os.environ.get("AWS_ACCESS_KEY_ID"), os.environ.get("AWS_SECRET_ACCESS_KEY")
            if not self.endpoint:
                missing = missing_programs()
                if missing:
                    raise S3Missing(f"{missing}; or name a server by ${_ENDPOINT}")
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="fastpipe-s3-"))
                self.folder = folder
                self.server = stack.enter_context(S3Server(Path(folder)))
                self.endpoint = self.server.endpoint
                key, secret = self.server.access_key, self.server.secret_key
            self.options = {"key": key, "secret": secret, "endpoint_url": self.endpoint}
            system = require("s3fs", extra="s3").S3FileSystem
            self._fs = system(**self.options, skip_instance_cache=True)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def port(self) -> int:
        """The server's port."""
        return int(self.endpoint.rpartition(":")[2])

    @property
    def pids(self) -> list[int]:
        """The processes that were started here."""
        return [] if self.server is None else self.server.pids

    def bucket(self) -> str:
        """The name of a new bucket."""
        name = f"fastpipe-{uuid.uuid4().hex[:8]}-{next(self._names)}"
        self._fs.call_s3("create_bucket", Bucket=name)
        return name

    def put(self, bucket: str, key: str, data: bytes) -> None:
        """Put an object into a bucket."""
        self._fs.call_s3("put_object", Bucket=bucket, Key=key, Body=data)

    def delete(self, bucket: str, key: str) -> None:
        """Remove an object."""
        self._fs.call_s3("delete_object", Bucket=bucket, Key=key)

    def keys(self, bucket: str) -> list[str]:
        """The keys of a bucket, up to a thousand."""
        found = self._fs.call_s3("list_objects_v2", Bucket=bucket).get("Contents", [])
        return [one["Key"] for one in found]

    def proxy(self, faults: Faults) -> S3Proxy:
        """A proxy before it."""
        return S3Proxy(self.port, faults, self.options)

    def stop_gateway(self, *, kill: bool = False) -> None:
        """End the program that answers.

        Raises:
            S3Missing: the server was not started here.
        """
        self._own().stop_gateway(kill=kill)

    def start_gateway(self) -> None:
        """Start it again."""
        self._own().start_gateway()

    def _own(self) -> S3Server:
        if self.server is None:
            raise S3Missing(f"the server at ${_ENDPOINT} cannot be stopped from here: unset it")
        return self.server
