"""Options of stores' clients, whose secrets appear nowhere, and their errors, which are fastpipe's."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
from pathlib import Path
from typing import Any

import pytest

from fastpipe import FastHDF5Dataset, FastImageFolder, FastPatchDataset, Stage
from fastpipe.errors import FastpipeError, OptionError, StoreAccessError, StoreError
from fastpipe.stores.clients import StorageOptions

PLAIN: dict[str, Any] = {
    "headers": {"region_name": "eu"}, "endpoint_url": "http://localhost:9000", "anon": False, "max_concurrency": 3,
}  # fmt: skip
GIVEN = PLAIN | {
    "key": "hunter2-key", "secret": "hunter2-secret", "token": "hunter2-token", "whatever": "hunter2-unknown",
    "connection_string": "AccountKey=hunter2-cs;",
    "headers": {"Authorization": "hunter2-bearer", "region_name": "eu"},
}  # fmt: skip


def test_a_repr_and_texts_have_no_secrets() -> None:
    text = repr(StorageOptions(GIVEN))
    assert "hunter2" not in text and all(name in text for name in GIVEN) and "http://localhost:9000" in text
    assert "hunter2" not in repr(StorageOptions({"endpoint_url": "http://me:hunter2@host"}))
    assert StorageOptions({"parts": ["hunter2"]}).hide("a hunter2 b") == "a … b"
    said = "bad AccountKey=hunter2-cs; for hunter2-bearer at http://localhost:9000"
    assert StorageOptions(GIVEN).hide(said) == "bad … for … at http://localhost:9000"


def test_copies_in_this_process_are_whole_and_a_pickle_has_no_secrets_and_says_so() -> None:
    given = dict(GIVEN)
    options = StorageOptions(given)
    given["key"] = "other"
    for copied in (options, copy.copy(options), copy.deepcopy(options)):
        copied.require("s3://bucket/")
        assert {**copied} == GIVEN and len(copied) == len(GIVEN)
    content = pickle.dumps(options)
    assert b"hunter2" not in content
    options = pickle.loads(content)
    assert {**options} == PLAIN
    for again in (options, pickle.loads(pickle.dumps(options))):  # what is missing stays known
        with pytest.raises(StoreAccessError, match=r"s3://bucket/.*pickles hold no secrets") as caught:
            again.require("s3://bucket/")
        for name in ("connection_string", "headers.Authorization", "key", "secret", "token", "whatever"):
            assert name in str(caught.value)
    whole = pickle.loads(pickle.dumps(StorageOptions(PLAIN)))
    whole.require("s3://bucket/")
    assert {**whole} == PLAIN and not StorageOptions(None)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_process_that_is_started_gets_all(method: str) -> None:
    context: Any = multiprocessing.get_context(method)
    child = context.Process(target=StorageOptions(GIVEN).require, args=("s3://bucket/",))
    child.start()
    child.join()
    assert child.exitcode == 0
    child.close()


KEYS: dict[str, Any] = {"key": "x", "secret": "y"}
ARN = "arn:aws:s3:us-west-2:123456789012:accesspoint/my-ap"


@pytest.mark.few(20)
@pytest.mark.usefixtures("bare_environment")
@pytest.mark.parametrize("door", ["images", "hdf5", "volumes"])
@pytest.mark.parametrize(
    ("url", "options", "config", "kind"),
    [
        ("s3://b!d/x", KEYS, "", StoreError),
        ("s3://arn:aws:s3:us-west-2:12:accesspoint/my-ap/x", KEYS, "", StoreError),
        ("s3://arn:aws:iam::123456789012:user/x/y", KEYS, "", StoreError),
        (f"s3://{ARN}/x", {}, "", StoreAccessError), ("s3://bucket/x", {}, "", StoreAccessError),
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
)  # fmt: skip
def test_errors_of_clients_are_fastpipes(
    tmp_path: Path, door: str, url: str, options: Any, config: str, kind: type
) -> None:
    pytest.importorskip("s3fs")
    if config:
        (tmp_path / "config").write_text(config)
    with pytest.raises(FastpipeError) as failed:
        if door == "images":
            FastImageFolder(url, storage_options=options)
        elif door == "hdf5":
            FastHDF5Dataset(f"{url}/x.h5", "x", storage_options=options, stage=Stage(tmp_path / "s"))
        else:
            FastPatchDataset(f"{url}/x.zarr", (2, 2), storage_options={} if options is None else options)
    assert isinstance(failed.value, kind)
    assert len(str(failed.value)) > 40
