"""Buckets of a real server: faults on the way, who may read, options, and other processes."""

from __future__ import annotations

import logging
import pickle
import socket
from collections.abc import Callable
from contextlib import ExitStack, closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from delay_proxy import Faults

from fastpipe.errors import OptionError, StoreAccessError, StoreBusyError
from fastpipe.stores.clients import StorageOptions
from fastpipe.stores.locations import Location
from fastpipe.stores.opening import open_store
from fastpipe.stores.retrying import RetryingStore
from fastpipe.stores.s3 import ObjectStore, S3fsStore, S3Settings

pytestmark = pytest.mark.usefixtures("bare_environment")

SECRET = "hunter2-secret-value"
DATA = bytes(range(256)) * 400
KEY = "train/cat/x.jpg"
NO_DELAY = {"delay_ms": 0, "jitter_ms": 0}


@pytest.fixture(params=[ObjectStore, S3fsStore])
def opened(request: pytest.FixtureRequest) -> Any:
    """Opens stores by one of the clients, and closes them."""
    with ExitStack() as stores:

        def make(bucket: str, options: dict[str, Any] | None) -> Any:
            store = request.param(Location.of(f"s3://{bucket}/train"), StorageOptions(options))
            return stores.enter_context(closing(store))

        yield make


@pytest.fixture(scope="module")
def filled(s3: Any) -> str:
    """A bucket, whose objects stay as they are."""
    name: str = s3.bucket()
    s3.put(name, KEY, DATA)
    s3.put(name, "train/cat/../odd.jpg", DATA)
    return name


REQUESTS: dict[str, Callable[[Any], object]] = {
    "get": lambda store: store.get(KEY),
    "get_range": lambda store: store.get_range(KEY, 0, 5),
    "get an odd key": lambda store: store.get("train/cat/../odd.jpg"),
    "objects": lambda store: list(store.objects("train/cat/")),
    "objects of all": lambda store: list(store.objects("")),
    "folders": lambda store: store.folders("train/"),
}


def refused(store: Any, error: type[Exception], message: str) -> list[str]:
    """Make all requests, of which each raises the error; their texts."""
    texts = []
    for ask in REQUESTS.values():
        with pytest.raises(error, match=message) as caught:
            ask(store)
        texts.append(f"{caught.value}{caught.value.__cause__}{store!r}")
    return texts


def test_wrong_credentials_and_buckets_are_refused(opened: Any, s3: Any, filled: str) -> None:
    wrong = opened(filled, {**s3.options, "secret": SECRET})
    for text in refused(wrong, StoreAccessError, "SignatureDoesNotMatch"):
        assert SECRET not in text and f"s3://{filled}/" in text and "storage_options" in text
    refused(opened(filled, {**s3.options, "key": "nobody"}), StoreAccessError, "InvalidAccessKeyId")
    with pytest.raises(StoreAccessError, match=r"AccessDenied.*anon"):
        opened(filled, {"anon": True, "endpoint_url": s3.endpoint}).get(KEY)
    with pytest.raises(StoreAccessError, match=r"[Cc]redentials"):
        opened(filled, {"endpoint_url": s3.endpoint}).get(KEY)
    refused(opened("there-is-none", s3.options), FileNotFoundError, r"s3://there-is-none/.*no such bucket")


@pytest.mark.few(3)
@pytest.mark.parametrize("fault", [{"busy": 1.0}, {"cut": 1.0, "cut_after": 100}])
def test_a_busy_or_cut_off_server_may_be_asked_again(opened: Any, s3: Any, filled: str, fault: Any) -> None:
    with s3.proxy(Faults(**NO_DELAY)) as proxy:
        store = opened(filled, proxy.options)
        for name, ask in REQUESTS.items():
            proxy.change(**fault)
            with pytest.raises(StoreBusyError, match=f"s3://{filled}/"):
                ask(store)
            proxy.change(busy=0.0, cut=0.0)
            assert ask(store), name
        for after in (0, 1, 1000, 50_000, len(DATA)):  # half of an object is never taken for all
            proxy.change(cut=1.0, cut_after=after)
            with pytest.raises(StoreBusyError):
                store.get(KEY)
    refused(store, StoreBusyError, f"s3://{filled}/")  # the server is gone


def test_a_silent_server_may_be_asked_again(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastpipe.stores.s3._READ", timedelta(seconds=0.2))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        options = {"key": "k", "secret": "s", "endpoint_url": f"http://127.0.0.1:{silent.getsockname()[1]}"}
        with pytest.raises(StoreBusyError, match=r"s3://bucket/train/x\.jpg"):
            opened("bucket", options).get("train/x.jpg")


def test_the_environment_has_credentials(opened: Any, s3: Any, filled: str, monkeypatch: Any) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3.options["key"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.options["secret"])
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3.endpoint)
    store = opened(filled, None)
    assert store.get(KEY).data == DATA
    assert store.name == opened(filled, s3.options).name


@pytest.mark.parametrize("by_option", [False, True])
def test_a_profile_has_credentials(
    opened: Any, s3: Any, filled: str, monkeypatch: Any, tmp_path: Path, by_option: bool
) -> None:
    key, secret = s3.options["key"], s3.options["secret"]
    credentials = f"[work]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n"
    (tmp_path / "credentials").write_text(credentials)
    (tmp_path / "config").write_text(f"[profile work]\nendpoint_url = {s3.endpoint}\nregion = eu-west-1\n")
    if not by_option:
        monkeypatch.setenv("AWS_PROFILE", "work")
    store = opened(filled, {"profile": "work"} if by_option else None)
    assert store.get(KEY).data == DATA
    assert pickle.loads(pickle.dumps(store)).get(KEY).data == DATA


def test_given_credentials_are_taken_alone(opened: Any, s3: Any, filled: str, monkeypatch: Any) -> None:
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "SESSION_TOKEN"):
        monkeypatch.setenv(f"AWS_{name}", "other")
    for name in ("SKIP_SIGNATURE", "REQUEST_PAYER", "VIRTUAL_HOSTED_STYLE_REQUEST"):
        monkeypatch.setenv(f"AWS_{name}", "true")
    for name in ("ENDPOINT_URL", "ENDPOINT"):
        monkeypatch.setenv(f"AWS_{name}", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    assert opened(filled, s3.options).get(KEY).data == DATA


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"key": "a"}, OptionError, "both key and secret"), ({"secret": SECRET}, OptionError, "both key and secret"),
        ({"endpoint_url": f"http://me:{SECRET}@host:9000"}, OptionError, "endpoint_url has credentials"),
        ({"profile": "nobody"}, StoreAccessError, "nobody.*profile"),
        *(({"key": "k", "secret": SECRET, "endpoint_url": url}, OptionError, "endpoint_url must be a URL")
          for url in ("no url", "localhost:9000", "http://", "http://a b", "http://\xe4")),
    ],
)  # fmt: skip
def test_options_that_cannot_work_are_refused(options: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        open_store("s3://bucket", options)
    assert SECRET not in str(caught.value)


def test_known_options_go_to_obstore() -> None:
    known = {
        "key": "k", "secret": "s", "token": "t", "anon": False, "requester_pays": True,
        "client_kwargs": {"endpoint_url": "http://host:9000/", "region_name": "eu-west-3"},
    }  # fmt: skip
    store, _ = open_store("s3://bucket/x", known)
    assert isinstance(store, ObjectStore)
    assert store.name == "s3://bucket at http://host:9000"
    assert open_store("s3://bucket/x", {"anon": True})[0].name == "s3://bucket"  # Amazon's
    arguments = S3Settings.of(StorageOptions(known)).obstore("")
    assert arguments["region"] == "eu-west-3" and arguments["request_payer"] is True
    assert arguments["endpoint"] == "http://host:9000" and arguments["client_options"]["allow_http"]
    assert arguments["credential_provider"]()["token"] == "t"
    assert arguments["retry_config"] == {"max_retries": 0}


@pytest.mark.parametrize(
    ("url", "options", "why"),
    [
        ("s3://bucket/x", {"config_kwargs": {"s3": {}}}, "obstore does not know config_kwargs"),
        ("s3://bucket/x", {"client_kwargs": {"verify": False}}, "obstore does not know verify"),
        ("s3://bucket/x", {"use_ssl": False}, "obstore does not know use_ssl"),
        ("s3://arn:aws:s3:eu-west-1:123456789012:accesspoint/x", {"anon": True}, "obstore does not know buckets"),
        ("s3://b cket/x", {"anon": True}, "obstore does not know buckets"),
        ("s3://b\xfccket/x", {"anon": True}, "obstore does not know buckets"),
        ("s3://bucket/x", None, "obstore is not installed"),
    ],
)  # fmt: skip
def test_s3fs_reads_the_rest(url: str, options: Any, why: str, caplog: Any, monkeypatch: Any) -> None:
    if "installed" in why:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with caplog.at_level(logging.INFO, "fastpipe.stage"):
        assert isinstance(open_store(url, options)[0], S3fsStore)
    assert why in caplog.text


def test_the_region_is_asked_for_only_where_it_matters(s3: Any, filled: str, monkeypatch: Any) -> None:
    asked: list[str] = []
    with s3.proxy(Faults(**NO_DELAY, busy=1.0)) as proxy:
        places = [(filled, s3.options), ("there-is-none", s3.options), (filled, proxy.options)]
        none, gone, busy = (
            S3fsStore(Location.of(f"s3://{at}"), StorageOptions(given)) for at, given in places
        )
        assert none.region() == gone.region() == ""  # of a bucket that is gone the next request says so
        with pytest.raises(StoreBusyError):
            busy.region()
        for one in (none, gone, busy):
            one.close()
    monkeypatch.setattr(S3fsStore, "region", lambda self: asked.append(self.name) or "eu-north-1")  # type: ignore[func-returns-value]
    for options in (s3.options, {**s3.options, "client_kwargs": {"region_name": "eu-west-1"}}):
        with closing(open_store(f"s3://{filled}", options)[0]) as store:
            assert store.get(KEY).data == DATA
    assert asked == []
    amazons: Any = open_store("s3://bucket", {"anon": True})[0]
    assert amazons._client.get().config["region"] == "eu-north-1" and asked == ["s3://bucket"]


def test_a_pickle_has_no_secrets(opened: Any, s3: Any, filled: str) -> None:
    store = opened(filled, s3.options)
    for one in (store, RetryingStore(store)):
        content = pickle.dumps(one)
        assert s3.options["secret"].encode() not in content
        again = pickle.loads(content)
        assert again.name == store.name
        refused(again, StoreAccessError, "pickles hold no secrets")
