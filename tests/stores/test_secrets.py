"""Secrets of storage options appear nowhere."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
from typing import Any

import pytest

from fastpipe.errors import StoreAccessError
from fastpipe.stores.clients import StorageOptions

_GIVEN: dict[str, Any] = {
    "key": "hunter2-key",
    "secret": "hunter2-secret",
    "token": "hunter2-token",
    "connection_string": "AccountKey=hunter2-cs;",
    "whatever": "hunter2-unknown",
    "headers": {"Authorization": "hunter2-bearer", "region_name": "eu"},
    "endpoint_url": "http://localhost:9000",
    "anon": False,
    "max_concurrency": 3,
}
_PLAIN = {
    "headers": {"region_name": "eu"},
    "endpoint_url": "http://localhost:9000",
    "anon": False,
    "max_concurrency": 3,
}
_NAMES = ("connection_string", "headers.Authorization", "key", "secret", "token", "whatever")


def test_a_repr_has_names_alone() -> None:
    shown = repr(StorageOptions(_GIVEN))
    assert "hunter2" not in shown
    for name in _GIVEN:
        assert name in shown
    assert "http://localhost:9000" in shown


def test_a_url_with_a_user_is_not_shown() -> None:
    assert "hunter2" not in repr(StorageOptions({"endpoint_url": "http://me:hunter2@host"}))


def test_options_are_a_mapping_that_does_not_follow_the_given_one() -> None:
    given = dict(_GIVEN)
    options = StorageOptions(given)
    given["key"] = "other"
    assert {**options} == _GIVEN and len(options) == len(_GIVEN)
    assert not StorageOptions(None)


def test_a_pickle_has_no_secrets_and_says_so_when_it_is_used() -> None:
    content = pickle.dumps(StorageOptions(_GIVEN))
    assert b"hunter2" not in content
    options = pickle.loads(content)
    assert {**options} == _PLAIN
    with pytest.raises(StoreAccessError, match="pickles hold no secrets") as caught:
        options.require("s3://bucket/")
    assert "s3://bucket/" in str(caught.value)
    for name in _NAMES:
        assert name in str(caught.value)
    again = pickle.loads(pickle.dumps(options))  # what is missing stays known
    with pytest.raises(StoreAccessError, match="whatever"):
        again.require("s3://bucket/")


def test_without_secrets_a_pickle_is_whole() -> None:
    options = pickle.loads(pickle.dumps(StorageOptions(_PLAIN)))
    options.require("s3://bucket/")
    assert {**options} == _PLAIN


def test_copies_in_this_process_are_whole() -> None:
    options = StorageOptions(_GIVEN)
    for copied in (copy.copy(options), copy.deepcopy(options)):
        copied.require("s3://bucket/")
        assert {**copied} == _GIVEN


def _check(options: StorageOptions) -> None:
    options.require("s3://bucket/")
    assert {**options} == _GIVEN


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_process_that_is_started_gets_all(method: str) -> None:
    child = multiprocessing.get_context(method).Process(target=_check, args=(StorageOptions(_GIVEN),))
    child.start()
    child.join()
    assert child.exitcode == 0
    child.close()


def test_texts_are_cleared_of_secrets() -> None:
    assert StorageOptions({"parts": ["hunter2"]}).hide("a hunter2 b") == "a … b"
    text = StorageOptions(_GIVEN).hide(
        "bad AccountKey=hunter2-cs; for hunter2-bearer at http://localhost:9000"
    )
    assert text == "bad … for … at http://localhost:9000"
