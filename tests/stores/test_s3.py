"""Buckets of a real server: what goes wrong on the way, who may read, and other processes."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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

_SECRET = "hunter2-secret-value"
_CLIENTS = ("obstore", "s3fs")
_DATA = bytes(range(256)) * 400


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nobody's credentials but those that a test gives."""
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture(params=_CLIENTS)
def opened(request: pytest.FixtureRequest) -> Any:
    """Opens stores by one of the clients, and closes them."""
    stores: list[Any] = []

    def make(bucket: str, options: dict[str, Any] | None) -> Any:
        location = Location.of(f"s3://{bucket}/train")
        kind = ObjectStore if request.param == "obstore" else S3fsStore
        stores.append(kind(location, StorageOptions(options)))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


@pytest.fixture(scope="module")
def filled(s3: Any) -> str:
    """A bucket, whose objects stay as they are."""
    name = s3.bucket()
    s3.put(name, "train/cat/x.jpg", _DATA)
    s3.put(name, "train/cat/../odd.jpg", _DATA)
    return str(name)


_REQUESTS: dict[str, Callable[[Any], object]] = {
    "get": lambda store: store.get("train/cat/x.jpg"),
    "get_range": lambda store: store.get_range("train/cat/x.jpg", 0, 5),
    "get an odd key": lambda store: store.get("train/cat/../odd.jpg"),
    "objects": lambda store: list(store.objects("train/cat/")),
    "objects of all": lambda store: list(store.objects("")),
    "folders": lambda store: store.folders("train/"),
}
requests = pytest.mark.parametrize("ask", _REQUESTS.values(), ids=_REQUESTS)


@pytest.mark.few(4)
@requests
def test_a_wrong_secret_is_refused_and_not_shown(opened: Any, s3: Any, filled: str, ask: Any) -> None:
    store = opened(filled, {**s3.options, "secret": _SECRET})
    with pytest.raises(StoreAccessError, match="SignatureDoesNotMatch") as caught:
        ask(store)
    assert _SECRET not in f"{caught.value}{caught.value.__cause__}{store!r}"
    assert f"s3://{filled}/" in str(caught.value) and "storage_options" in str(caught.value)


@requests
def test_an_unknown_user_is_refused(opened: Any, s3: Any, filled: str, ask: Any) -> None:
    with pytest.raises(StoreAccessError, match="InvalidAccessKeyId"):
        ask(opened(filled, {**s3.options, "key": "nobody", "secret": _SECRET}))


def test_without_credentials_nobody_is_let_in(opened: Any, s3: Any, filled: str) -> None:
    with pytest.raises(StoreAccessError, match=r"AccessDenied.*anon"):
        opened(filled, {"anon": True, "endpoint_url": s3.endpoint}).get("train/cat/x.jpg")
    with pytest.raises(StoreAccessError, match=r"[Cc]redentials"):
        opened(filled, {"endpoint_url": s3.endpoint}).get("train/cat/x.jpg")


@requests
def test_a_wrong_bucket_is_not_found(opened: Any, s3: Any, ask: Any) -> None:
    with pytest.raises(FileNotFoundError, match=r"s3://there-is-none/.*no such bucket"):
        ask(opened("there-is-none", s3.options))


@pytest.mark.few(1)
@pytest.mark.parametrize("fault", [{"busy": 1.0}, {"cut": 1.0, "cut_after": 100}])
def test_a_server_that_is_busy_or_cut_off_may_be_asked_again(
    opened: Any, s3: Any, filled: str, fault: dict[str, float]
) -> None:
    with s3.proxy(Faults(delay_ms=0, jitter_ms=0)) as proxy:
        for name, ask in _REQUESTS.items():
            store = opened(filled, proxy.options)
            proxy.change(**fault)
            with pytest.raises(StoreBusyError, match=f"s3://{filled}/"):
                ask(store)
            proxy.change(busy=0.0, cut=0.0)
            assert ask(store), name


def test_a_server_that_says_nothing_may_be_asked_again(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastpipe.stores.s3._READ", timedelta(seconds=0.2))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        options = {"key": "k", "secret": "s", "endpoint_url": f"http://127.0.0.1:{silent.getsockname()[1]}"}
        with pytest.raises(StoreBusyError, match=r"s3://bucket/train/x\.jpg"):
            opened("bucket", options).get("train/x.jpg")


def test_half_of_an_object_is_never_taken_for_all(opened: Any, s3: Any, filled: str) -> None:
    with s3.proxy(Faults(delay_ms=0, jitter_ms=0, cut=1.0)) as proxy:
        store = opened(filled, proxy.options)
        for after in (0, 1, 1000, 50_000, len(_DATA)):
            proxy.change(cut_after=after)
            with pytest.raises(StoreBusyError):
                store.get("train/cat/x.jpg")


@pytest.mark.few(1)
def test_a_server_that_is_gone_may_be_asked_again(opened: Any, s3: Any, filled: str) -> None:
    with s3.proxy(Faults(delay_ms=0, jitter_ms=0)) as proxy:
        stores = {name: opened(filled, proxy.options) for name in _REQUESTS}
        for name, ask in _REQUESTS.items():
            ask(stores[name])
    for name, ask in _REQUESTS.items():
        with pytest.raises(StoreBusyError, match=f"s3://{filled}/"):
            ask(stores[name])


@pytest.mark.leaks("the gateway that is started again is the whole session's")
def test_a_server_that_comes_back_is_read_again(s3: Any, filled: str) -> None:
    stores = [open_store(f"s3://{filled}", s3.options)[0], S3fsStore(*_parts(filled, s3.options))]
    before = [store.get("train/cat/x.jpg") for store in stores]
    s3.stop_gateway(kill=True)
    try:
        for store in stores:
            with pytest.raises(StoreBusyError):
                store.get("train/cat/x.jpg")
    finally:
        s3.start_gateway()
    assert [store.get("train/cat/x.jpg") for store in stores] == before
    for store in stores:
        store.close()


def _parts(bucket: str, options: Any) -> tuple[Location, StorageOptions]:
    return Location.of(f"s3://{bucket}"), StorageOptions(options)


def test_a_store_that_asks_again_gets_all(s3: Any, filled: str, caplog: pytest.LogCaptureFixture) -> None:
    keys = [f"later/dog/{number}.jpg" for number in range(60)]
    for key in keys:
        s3.put(filled, key, _DATA + key.encode())
    with s3.proxy(Faults(delay_ms=0, jitter_ms=0, busy=0.2, cut=0.2)) as proxy:
        store = RetryingStore(
            open_store(f"s3://{filled}/train", proxy.options)[0], wait=lambda seconds: False
        )
        listed = [one for page in store.objects("later/dog/") for one in page]
        with ThreadPoolExecutor(16) as pool:
            got = list(pool.map(lambda one: store.get(one.key, one.version).data, listed))
        store.close()
    assert sorted(got) == sorted(_DATA + key.encode() for key in keys)
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 1


class TestCredentials:
    """Where they come from."""

    def test_the_environment(
        self, opened: Any, s3: Any, filled: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3.options["key"])
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.options["secret"])
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3.endpoint)
        store = opened(filled, None)
        assert store.get("train/cat/x.jpg").data == _DATA
        assert store.name == opened(filled, s3.options).name

    @pytest.mark.parametrize("by_option", [False, True])
    def test_a_profile(
        self,
        opened: Any,
        s3: Any,
        filled: str,
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
        by_option: bool,
    ) -> None:
        key, secret = s3.options["key"], s3.options["secret"]
        (tmp_path / "credentials").write_text(
            f"[work]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n"
        )
        (tmp_path / "config").write_text(
            f"[profile work]\nendpoint_url = {s3.endpoint}\nregion = eu-west-1\n"
        )
        if not by_option:
            monkeypatch.setenv("AWS_PROFILE", "work")
        store = opened(filled, {"profile": "work"} if by_option else None)
        assert store.get("train/cat/x.jpg").data == _DATA
        assert pickle.loads(pickle.dumps(store)).get("train/cat/x.jpg").data == _DATA

    def test_an_unknown_profile(self) -> None:
        with pytest.raises(StoreAccessError, match=r"nobody.*profile"):
            open_store("s3://bucket", {"profile": "nobody"})

    def test_what_is_given_is_not_mixed_with_the_environment(
        self, opened: Any, s3: Any, filled: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name, value in {
            "AWS_ACCESS_KEY_ID": "other",
            "AWS_SECRET_ACCESS_KEY": "other",
            "AWS_SESSION_TOKEN": "other",
            "AWS_SKIP_SIGNATURE": "true",
            "AWS_REQUEST_PAYER": "true",
            "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "true",
            "AWS_ENDPOINT_URL": "http://127.0.0.1:1",
            "AWS_ENDPOINT": "http://127.0.0.1:1",
            "AWS_REGION": "eu-west-1",
        }.items():
            monkeypatch.setenv(name, value)
        assert opened(filled, s3.options).get("train/cat/x.jpg").data == _DATA

    def test_half_of_a_pair_is_refused(self) -> None:
        for options in ({"key": "a"}, {"secret": _SECRET}):
            with pytest.raises(OptionError, match="both key and secret") as caught:
                open_store("s3://bucket", options)
            assert _SECRET not in str(caught.value)

    def test_an_endpoint_with_a_user_is_refused(self) -> None:
        with pytest.raises(OptionError, match="endpoint_url has credentials") as caught:
            open_store("s3://bucket", {"endpoint_url": f"http://me:{_SECRET}@host:9000"})
        assert _SECRET not in str(caught.value)


class TestOptions:
    """Which client, and how."""

    def test_known_options_go_to_obstore(self) -> None:
        known = {
            "key": "k", "secret": "s", "token": "t", "anon": False, "requester_pays": True,
            "client_kwargs": {"endpoint_url": "http://host:9000/", "region_name": "eu-west-3"},
        }  # fmt: skip
        store, _ = open_store("s3://bucket/x", known)
        assert isinstance(store, ObjectStore)
        assert store.name == "s3://bucket at http://host:9000"
        arguments = S3Settings.of(StorageOptions(known)).obstore("")
        assert arguments["region"] == "eu-west-3" and arguments["request_payer"] is True
        assert arguments["endpoint"] == "http://host:9000" and arguments["client_options"]["allow_http"]
        assert arguments["credential_provider"]()["token"] == "t"
        assert arguments["retry_config"] == {"max_retries": 0}

    @pytest.mark.parametrize(
        "unknown", [{"config_kwargs": {"s3": {}}}, {"client_kwargs": {"verify": False}}, {"use_ssl": False}]
    )
    def test_unknown_options_go_to_s3fs(
        self, unknown: dict[str, Any], caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.INFO, "fastpipe.stage"):
            store, _ = open_store("s3://bucket/x", unknown)
        assert isinstance(store, S3fsStore)
        assert (
            f"obstore does not know {next(iter(unknown)) if 'verify' not in str(unknown) else 'verify'}"
            in caplog.text
        )

    def test_without_obstore_s3fs_reads(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        with caplog.at_level(logging.INFO, "fastpipe.stage"):
            assert isinstance(open_store("s3://bucket/x")[0], S3fsStore)
        assert "obstore is not installed" in caplog.text

    @pytest.mark.parametrize("endpoint", ["no url", "localhost:9000", "http://", "http://a b", "http://\xe4"])
    def test_an_endpoint_that_is_no_url_is_refused(self, endpoint: str) -> None:
        with pytest.raises(OptionError, match="endpoint_url must be a URL"):
            open_store("s3://bucket/x", {"key": "k", "secret": _SECRET, "endpoint_url": endpoint})

    def test_what_is_no_plain_bucket_goes_to_s3fs(self) -> None:
        for bucket in ("arn:aws:s3:eu-west-1:123456789012:accesspoint", "b cket", "b\xfccket"):
            assert isinstance(open_store(f"s3://{bucket}/x", {"anon": True})[0], S3fsStore)

    def test_of_amazon_a_bucket_is_named_alone(self) -> None:
        assert open_store("s3://bucket/x", {"anon": True})[0].name == "s3://bucket"

    def test_the_server_is_asked_for_a_region_only_where_it_matters(
        self, s3: Any, filled: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[str] = []
        monkeypatch.setattr(S3fsStore, "region", lambda self: asked.append(self.name) or "eu-north-1")
        for options in (s3.options, {**s3.options, "client_kwargs": {"region_name": "eu-west-1"}}):
            store, _ = open_store(f"s3://{filled}", options)
            assert store.get("train/cat/x.jpg").data == _DATA
            store.close()
        assert asked == []
        store, _ = open_store("s3://bucket", {"anon": True})
        assert isinstance(store, ObjectStore)
        assert store._client.get().config["region"] == "eu-north-1"
        assert asked == ["s3://bucket"]

    def test_a_server_without_regions_says_none(self, s3: Any, filled: str) -> None:
        store = S3fsStore(Location.of(f"s3://{filled}"), StorageOptions(s3.options))
        assert store.region() == ""
        store.close()
        missing = S3fsStore(Location.of("s3://there-is-none"), StorageOptions(s3.options))
        assert missing.region() == ""  # the request that follows says so
        missing.close()

    def test_a_busy_server_is_not_taken_for_one_without_regions(self, s3: Any, filled: str) -> None:
        with s3.proxy(Faults(delay_ms=0, jitter_ms=0, busy=1.0)) as proxy:
            store = S3fsStore(Location.of(f"s3://{filled}"), StorageOptions(proxy.options))
            with pytest.raises(StoreBusyError):
                store.region()
            store.close()


class TestProcesses:
    """Stores in other processes than the one that opened them."""

    @pytest.mark.few(1)
    def test_a_forked_child_reads_while_its_parent_does(
        self, opened: Any, s3: Any, filled: str, in_child: Callable[[Callable[[], object]], None]
    ) -> None:
        store = opened(filled, s3.options)
        listed = list(store.objects("train/cat/"))
        assert store.get("train/cat/x.jpg").data == _DATA

        def child() -> None:
            assert store.get("train/cat/x.jpg").data == _DATA
            assert list(store.objects("train/cat/")) == listed
            assert store.folders("train/") == ["cat"]
            other, _ = open_store(f"s3://{filled}", s3.options)
            assert other.get_range("train/cat/x.jpg", 1, 5) == _DATA[1:5]
            assert store.describe() == "s3fs"
            in_child(lambda: store.get("train/cat/x.jpg"))

        for _ in range(3):
            in_child(child)
            assert store.get("train/cat/x.jpg").data == _DATA
            assert store.get("train/cat/../odd.jpg").data == _DATA

    def test_a_pickle_has_no_secrets(self, opened: Any, s3: Any, filled: str) -> None:
        store = opened(filled, s3.options)
        for one in (store, RetryingStore(store)):
            content = pickle.dumps(one)
            assert s3.options["secret"].encode() not in content
            again = pickle.loads(content)
            assert again.name == store.name
            for ask in _REQUESTS.values():
                with pytest.raises(StoreAccessError, match="pickles hold no secrets"):
                    ask(again)

    def test_a_spawned_process_reads(self, opened: Any, s3: Any, filled: str) -> None:
        store = RetryingStore(opened(filled, s3.options))
        child = multiprocessing.get_context("spawn").Process(target=_read, args=(store,))
        child.start()
        child.join()
        assert child.exitcode == 0
        child.close()


def _read(store: Any) -> None:
    assert store.get("train/cat/x.jpg").data == _DATA
    assert [len(page) for page in store.objects("train/cat/")] == [2]
    store.close()
