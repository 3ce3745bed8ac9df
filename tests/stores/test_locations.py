"""Addresses of stores."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastpipe.core.files import is_url
from fastpipe.errors import OptionError
from fastpipe.stores.locations import Location


@pytest.mark.parametrize(
    "root", ["s3://bucket", "S3://bucket/x", "gs://b/x", "memory://x", "file:///data", "abfs://c@a.dfs.x/y"]
)
def test_urls_are_urls(root: str) -> None:
    assert is_url(root)


@pytest.mark.parametrize(
    "root", ["/data", "data", "C:\\x", "c://x", "a:/b", "", ".", "//host/x", "/a/s3://b"]
)
def test_paths_are_no_urls(root: str) -> None:
    assert not is_url(root)
    assert not is_url(Path(root))


@pytest.mark.parametrize(
    ("given", "root", "bucket", "prefix"),
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
def test_parts_of_a_location(given: str, root: str, bucket: str, prefix: str) -> None:
    location = Location.of(given)
    assert (location.root, location.bucket, location.prefix) == (root, bucket, prefix)
    assert Location.of(location.root) == location


def test_a_relative_folder_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Location.of("x").root == f"{tmp_path}/x/"
    assert Location.of(Path("x")) == Location.of("x")


@given(st.text(min_size=1), st.sampled_from(["s3://bucket/train", "file:///data", "/data/x", "memory://m"]))
def test_paths_and_keys_are_each_others(key: str, root: str) -> None:
    location = Location.of(root)
    assert location.key(location.path(key)) == key
    assert location.path(location.prefix + key) == location.root + key


def test_a_path_elsewhere_has_no_key() -> None:
    with pytest.raises(ValueError, match="is not in s3://bucket/"):
        Location.of("s3://bucket/train").key("s3://other/train/x")


@pytest.mark.parametrize(
    "root",
    [
        "s3://key:hunter2@bucket/x",
        "s3://hunter2@bucket",
        "https://me:hunter2@host/x",
        "sftp://me:hunter2@host/x",
        "abfs://me:hunter2@account.x/y",
        "https://host/x?sig=hunter2",
        "https://host?sig=hunter2",
    ],
)
def test_credentials_are_refused_and_not_shown(root: str) -> None:
    with pytest.raises(OptionError) as caught:
        Location.of(root)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("root", "message"),
    [("s3://", "names no bucket"), ("s3:///x", "names no bucket"), ("simplecache::s3://b", "chain")],
)
def test_what_cannot_work_is_refused(root: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Location.of(root)


ARN = "arn:aws:s3:us-west-2:123456789012:accesspoint"


@pytest.mark.parametrize("scheme", ["s3", "s3a"])
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
def test_buckets_and_keys_are_those_of_s3fs(scheme: str, rest: str) -> None:
    s3fs = pytest.importorskip("s3fs")
    bucket, key, _ = s3fs.S3FileSystem(anon=True, asynchronous=True).split_path(f"{scheme}://{rest}")
    location = Location.of(f"{scheme}://{rest}")
    assert (location.bucket, location.prefix.rstrip("/")) == (bucket, key)
    assert Location.of(location.root) == location


@pytest.mark.parametrize("scheme", ["file", "local"])
@pytest.mark.parametrize("rest", ["/data/x", "/data/a b%20#?*", "data/x", "~/x", "data", "/"])
def test_urls_of_files_are_those_of_fsspec(scheme: str, rest: str) -> None:
    local = pytest.importorskip("fsspec.implementations.local").LocalFileSystem
    location = Location.of(f"{scheme}://{rest}")
    assert location.bucket == "" and f"/{location.prefix}".rstrip("/") == local._strip_protocol(
        f"{scheme}://{rest}"
    ).rstrip("/")


@pytest.mark.parametrize(
    "url", ["simplecache::s3://b/k", "zip://a.csv::s3://b/x.zip", "filecache::zip://*.png::file:///x.zip"]
)
def test_chains_are_refused(url: str) -> None:
    with pytest.raises(OptionError, match="chain of file systems"):
        Location.of(url)


def test_one_version_of_an_object_is_refused() -> None:
    with pytest.raises(OptionError, match="names one version"):
        Location.of("s3://bucket/x.h5?versionId=3")
