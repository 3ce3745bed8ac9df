"""Addresses of stores."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastpipe.core.files import is_url
from fastpipe.errors import OptionError
from fastpipe.stores.locations import Location

URLS = ["s3://bucket", "S3://bucket/x", "gs://b/x", "memory://x", "file:///data", "abfs://c@a.dfs.x/y"]
PATHS = ["/data", "data", "C:\\x", "c://x", "a:/b", "", ".", "//host/x", "/a/s3://b"]


def test_urls_are_distinguished_from_paths() -> None:
    assert all(map(is_url, URLS))
    assert not any(is_url(path) or is_url(Path(path)) for path in PATHS)


@pytest.mark.parametrize(
    ("url", "root", "bucket", "prefix"),
    [
        ("s3://bucket", "s3://bucket/", "bucket", ""),
        ("s3://bucket/", "s3://bucket/", "bucket", ""),
        ("S3://Bucket/Train//", "s3://Bucket/Train/", "Bucket", "Train/"),
        ("s3://bucket//x", "s3://bucket//x/", "bucket", "/x/"),
        ("s3://bucket/a b%20?#c", "s3://bucket/a b%20?#c/", "bucket", "a b%20?#c/"),
        ("https://host:8080/x", "https://host:8080/x/", "host:8080", "x/"),
        ("file:///data/x", "file:///data/x/", "", "data/x/"),
        ("memory://x/y", "memory://x/y/", "x", "y/"),
        ("abfs://box@me.dfs.core.windows.net/x", "abfs://box@me.dfs.core.windows.net/x/",
         "box@me.dfs.core.windows.net", "x/"),
        ("/data/x/", "/data/x/", "/data/x", ""),
        ("/", "/", "/", ""),
    ],
)  # fmt: skip
def test_a_location_has_a_bucket_and_a_prefix(url: str, root: str, bucket: str, prefix: str) -> None:
    location = Location.of(url)
    assert (location.root, location.bucket, location.prefix) == (root, bucket, prefix)
    assert Location.of(location.root) == location


def test_a_relative_folder_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Location.of("x").root == f"{tmp_path}/x/"
    assert Location.of(Path("x")) == Location.of("x")


@given(st.text(min_size=1), st.sampled_from(["s3://bucket/train", "file:///data", "/data/x", "memory://m"]))
def test_keys_are_those_of_paths(key: str, root: str) -> None:
    location = Location.of(root)
    assert location.key(location.path(key)) == key
    assert location.path(location.prefix + key) == location.root + key
    with pytest.raises(ValueError, match="is not in"):
        location.key("s3://other/train/x")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3://key:hunter2@bucket/x", "has credentials in it"),
        ("s3://hunter2@bucket", "has credentials in it"),
        ("https://me:hunter2@host/x", "has credentials in it"),
        ("sftp://me:hunter2@host/x", "has credentials in it"),
        ("abfs://me:hunter2@account.x/y", "has credentials in it"),
        ("https://host/x?sig=hunter2", r"must end before its '\?'"),
        ("https://host?sig=hunter2", r"must end before its '\?'"),
        ("s3://", "names no bucket"),
        ("s3:///x", "names no bucket"),
        ("s3://bucket/x.h5?versionId=3", "names one version"),
        ("simplecache::s3://b/k", "chain of file systems"),
        ("zip://a.csv::s3://b/x.zip", "chain of file systems"),
        ("filecache::zip://*.png::file:///x.zip", "chain of file systems"),
    ],
)
def test_urls_that_cannot_work_are_refused_without_their_secrets(url: str, message: str) -> None:
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
