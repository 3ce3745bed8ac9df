"""Addresses of stores."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastpipe.core.files import is_url
from fastpipe.errors import OptionError
from fastpipe.stores.locations import Location


def test_urls_are_distinguished_from_paths() -> None:
    urls = ["s3://bucket", "S3://bucket/x", "gs://b/x", "memory://x", "file:///data", "abfs://c@a.dfs.x/y"]
    paths = ["/data", "data", "C:\\x", "c://x", "a:/b", "", ".", "//host/x", "/a/s3://b"]
    assert all(map(is_url, urls)) and not any(is_url(path) or is_url(Path(path)) for path in paths)


@pytest.mark.parametrize(
    ("url", "root", "bucket", "prefix"),
    [
        ("s3://bucket", "s3://bucket/", "bucket", ""), ("s3://bucket/", "s3://bucket/", "bucket", ""),
        ("S3://Bucket/Train//", "s3://Bucket/Train/", "Bucket", "Train/"),
        ("s3://bucket//x", "s3://bucket//x/", "bucket", "/x/"),
        ("https://host:8080/x", "https://host:8080/x/", "host:8080", "x/"),
        ("file:///data/x", "file:///data/x/", "", "data/x/"), ("memory://x/y", "memory://x/y/", "x", "y/"),
        ("abfs://box@me.dfs.x/x", "abfs://box@me.dfs.x/x/", "box@me.dfs.x", "x/"),
        ("/data/x/", "/data/x/", "/data/x", ""), ("/", "/", "/", ""),
    ],
)  # fmt: skip
def test_a_location_has_a_bucket_and_a_prefix(url: str, root: str, bucket: str, prefix: str) -> None:
    location = Location.of(url)
    assert (location.root, location.bucket, location.prefix) == (root, bucket, prefix)
    assert Location.of(location.root) == location
    assert Location.of("x") == Location.of(Path("x")) == Location.of(f"{Path.cwd()}/x/")


@given(st.text(min_size=1), st.sampled_from(["s3://bucket/train", "file:///data", "/data/x", "memory://m"]))
def test_keys_are_those_of_paths(key: str, root: str) -> None:
    location = Location.of(root)
    assert location.key(location.path(key)) == key
    assert location.path(location.prefix + key) == location.root + key
    with pytest.raises(ValueError, match="is not in"):
        location.key("s3://other/train/x")


@pytest.mark.parametrize(
    ("message", "urls"),
    [
        ("has credentials in it", [
            "s3://key:hunter2@bucket/x", "s3://hunter2@bucket", "https://me:hunter2@host/x",
            "sftp://me:hunter2@host/x", "abfs://me:hunter2@account.x/y",
        ]),
        (r"must end before its '\?'", ["https://host/x?sig=hunter2", "https://host?sig=hunter2"]),
        ("names no bucket", ["s3://", "s3:///x"]), ("names one version", ["s3://bucket/x.h5?versionId=3"]),
        ("chain of file systems", [
            "simplecache::s3://b/k", "zip://a.csv::s3://b/x.zip", "filecache::zip://*.png::file:///x.zip",
        ]),
    ],
)  # fmt: skip
def test_urls_that_cannot_work_are_refused_without_their_secrets(message: str, urls: list[str]) -> None:
    for url in urls:
        with pytest.raises(OptionError, match=message) as caught:
            Location.of(url)
        assert "hunter2" not in str(caught.value)


ARN = "arn:aws:s3:us-west-2:123456789012:accesspoint"


@pytest.mark.parametrize(
    "rest",
    [
        f"{ARN}/my-ap/train/a b?#%20", f"{ARN}:my-ap/train", f"{ARN}/my-ap", f"{ARN}/x.mrap/a/b",
        "arn:aws-cn:s3:cn-north-1:123456789012:accesspoint/my-ap/train",
        "arn:aws:s3-object-lambda:us-west-2:123456789012:accesspoint/my-ap/train",
        "arn:aws:s3-object-lambda:us-west-2:123456789012:accesspoint:my-ap/train",
        "arn:aws:s3-outposts:us-west-2:123456789012:outpost/op-01/accesspoint/my-ap/train",
        "arn:aws:s3-outposts:us-west-2:123456789012:outpost:op-01:accesspoint:my-ap/train",
        "bucket/a::b/c", "bucket/a b?#c", "bucket",
    ],
)  # fmt: skip
def test_buckets_and_keys_are_those_of_s3fs(rest: str) -> None:
    s3fs = pytest.importorskip("s3fs").S3FileSystem(anon=True, asynchronous=True)
    for scheme in ("s3", "s3a"):
        bucket, key, _ = s3fs.split_path(f"{scheme}://{rest}")
        location = Location.of(f"{scheme}://{rest}")
        assert (location.bucket, location.prefix.rstrip("/")) == (bucket, key)
        assert Location.of(location.root) == location


@pytest.mark.parametrize("scheme", ["file", "local"])
@pytest.mark.parametrize("rest", ["/data/x", "/data/a b%20#?*", "data/x", "~/x", "data", "/"])
def test_urls_of_files_are_those_of_fsspec(scheme: str, rest: str) -> None:
    fsspec = pytest.importorskip("fsspec.implementations.local").LocalFileSystem
    location, path = Location.of(f"{scheme}://{rest}"), fsspec._strip_protocol(f"{scheme}://{rest}")
    assert location.bucket == "" and f"/{location.prefix}".rstrip("/") == path.rstrip("/")
