"""What clients of stores raise comes out as an error of fastpipe's, whichever URL and options it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fastpipe import FastHDF5Dataset, FastImageFolder, FastPatchDataset, Stage
from fastpipe.errors import FastpipeError, OptionError, StoreAccessError, StoreError

KEYS: dict[str, Any] = {"key": "x", "secret": "y"}
ARN = "arn:aws:s3:us-west-2:123456789012:accesspoint/my-ap"


@pytest.fixture(autouse=True)
def _nothing_configured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("s3fs")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in (
        "AWS_PROFILE",
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_ENDPOINT_URL",
        "AWS_REGION",
    ):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("url", "options", "config", "kind"),
    [
        ("s3://b!d/x", KEYS, "", StoreError),
        ("s3://arn:aws:s3:us-west-2:12:accesspoint/my-ap/x", KEYS, "", StoreError),
        ("s3://arn:aws:iam::123456789012:user/x/y", KEYS, "", StoreError),
        (f"s3://{ARN}/x", {}, "", StoreAccessError),
        ("s3://bucket/x", {}, "", StoreAccessError),
        ("s3://bucket/x", {}, "[[[\n x", StoreAccessError),
        ("s3://bucket/x", {"profile": "none"}, "", StoreAccessError),
        ("s3://bucket/x", {}, "[default]\ncredential_process=/bin/false\n", StoreAccessError),
        ("s3://bucket/x", {**KEYS, "client_kwargs": {"region_name": "no region!"}}, "", OptionError),
        (f"s3://{ARN}/x", {**KEYS, "client_kwargs": {"region_name": "no region!"}}, "", OptionError),
        ("s3://bucket/x", {**KEYS, "client_kwargs": {"unknown": 1}}, "", OptionError),
        ("s3://bucket/x", {**KEYS, "unknown": 1}, "", OptionError),
        ("s3://bucket/x", {**KEYS, "endpoint_url": "http://[::1"}, "", OptionError),
        ("s3://bucket/x", {**KEYS, "endpoint_url": "http://a|b"}, "", OptionError),
        ("unknown://bucket/x", None, "", OptionError),
    ],
)
@pytest.mark.parametrize("door", ["images", "hdf5", "volumes"])
def test_errors_of_clients(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    door: str,
    url: str,
    options: Any,
    config: str,
    kind: type,
) -> None:
    if config:
        (tmp_path / "config").write_text(config)
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    with pytest.raises(FastpipeError) as failed:
        if door == "images":
            FastImageFolder(url, storage_options=options)
        elif door == "hdf5":
            FastHDF5Dataset(f"{url}/x.h5", "x", storage_options=options, stage=Stage(tmp_path / "s"))
        else:
            FastPatchDataset(f"{url}/x.zarr", (2, 2), storage_options={} if options is None else options)
    assert isinstance(failed.value, kind)
    assert len(str(failed.value)) > 40
