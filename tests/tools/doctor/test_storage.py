"""Folders and stores: what is measured of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from delay_proxy import Faults
from odd_images import write_fifo

from fastpipe.tools.doctor import (
    DoctorReport,
    storage,
    stores,
)
from fastpipe.tools.doctor import (
    examination as examining,
)
from fastpipe.tools.doctor import (
    storage as caching,
)
from fastpipe.tools.doctor import (
    storage as reading,
)
from fastpipe.tools.doctor.child import Answer
from fastpipe.tools.doctor.report import Examined
from fastpipe.tools.doctor.storage import Rate
from fastpipe.tools.doctor.storage import _read_many as read_many
from fastpipe.tools.doctor.storage import _sample as sample
from fastpipe.tools.folders import FileSystem, file_system

EVERYTHING = {"seconds": 60.0, "nbytes": 1 << 40}


@pytest.mark.parametrize("threads", [1, 7])
@pytest.mark.parametrize("past_cache", [False, True])
def test_every_file_is_read_once(threads: int, past_cache: bool, photo_tree: Path) -> None:
    found = sample(str(photo_tree))
    rate = read_many(found.files, threads, past_cache=past_cache, **EVERYTHING)
    assert (rate.files, rate.nbytes) == (24, sum(found.nbytes))
    assert rate.missed is None or 0 <= rate.missed <= 1


def test_time_and_bytes_are_bounded(photo_tree: Path) -> None:
    files = sample(str(photo_tree)).files
    assert read_many(files, 1, seconds=60.0, nbytes=1, past_cache=False).files == 1
    assert read_many(files, 4, seconds=-1.0, nbytes=1 << 40, past_cache=False).files == 0


def test_what_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"1234")
    (tmp_path / "link.jpg").symlink_to("nowhere")
    write_fifo(tmp_path)
    found = sample(str(tmp_path))
    assert found.files == (str(tmp_path / "a.jpg"),) and found.is_all
    gone = (*found.files, str(tmp_path / "gone.jpg"))
    assert read_many(gone, 2, past_cache=True, **EVERYTHING).files == 1


def test_large_folders_are_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(30):
        (tmp_path / f"{number:02}").write_bytes(b"x")
    monkeypatch.setattr(reading, "_MOST_FILES", 10)
    found = sample(str(tmp_path))
    assert len(found.files) == 10 and found.walked == 30 and not found.is_all


@pytest.mark.parametrize(
    ("kind", "state"),
    [("ext4", "ok"), ("overlay", "ok"), ("tmpfs", "ok"), ("", "ok"), ("nfs4", "warning"), ("fuse.s3fs", "warning"),
     ("fuse", "warning"), ("lustre", "warning"), ("virtiofs", "warning")],
)  # fmt: skip
def test_kinds_of_file_systems(kind: str, state: str) -> None:
    found = storage._kind("/data", FileSystem(kind, 0))
    assert found.state == state and (state == "ok" or "stage=" in found.remedy)
    assert kind != "fuse.s3fs" or "s3://" in found.remedy


def test_the_kind_is_that_of_the_mount(tmp_path: Path) -> None:
    device = os.stat(tmp_path).st_dev
    mounts = f"30 23 {os.major(device)}:{os.minor(device)} / {tmp_path} rw - fuse.rclone bucket:secret rw\n"
    assert file_system(str(tmp_path), mounts).kind == "fuse.rclone"
    assert file_system(str(tmp_path)).free > 0


def test_a_folder(photo_tree: Path) -> None:
    examined = Examined(folder=str(photo_tree), name="photos")
    found = list(storage.check(examined))
    texts = [one.text for one in found]
    assert texts[0].startswith("photos is on ") and "looked at 24 files" in texts[1]
    assert any("16 threads" in text for text in texts) and len(examined.photos) == 24


def test_a_folder_whose_name_is_no_utf8(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"data\xff")
    folder.mkdir()
    (folder / "a.jpg").write_bytes(b"1234")
    (folder / "b.jpg").write_bytes(b"1234")
    examined = examining._examined(folder, {})
    report = DoctorReport(tuple(storage.check(examined)), examined.name)
    assert "data\\xff is on" in str(report) and "data\\\\xff" in report.json()


def test_a_large_file_and_an_empty_folder(tmp_path: Path) -> None:
    (found,) = [one for one in storage.check(Examined(folder=str(tmp_path))) if one.state == "warning"]
    assert "no file" in found.text
    (tmp_path / "x.h5").write_bytes(bytes(5 << 20))
    texts = [one.text for one in storage.check(Examined(folder=str(tmp_path / "x.h5")))]
    assert any("one file in order" in text for text in texts)


def test_a_disk_that_was_not_measured_is_not_called_one() -> None:
    assert "from the disk" in storage._past(Rate(1, 1, 1.0, 1.0))
    assert "100% were in memory" in storage._past(Rate(1, 1, 1.0, 0.0))
    assert "told to forget" in storage._past(Rate(1, 1, 1.0, None))


def test_the_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "not" / "yet"))
    (found,) = caching.check_cache(Examined())
    assert str(tmp_path / "not" / "yet") in found.text and not (tmp_path / "not").exists()
    monkeypatch.setattr(caching, "file_system", lambda _: FileSystem("nfs", 1 << 40))
    (found,) = caching.check_cache(Examined())
    assert found.state == "warning" and "XDG_CACHE_HOME" in found.remedy
    monkeypatch.setattr(caching, "file_system", lambda _: FileSystem("ext4", 1 << 20))
    (found,) = caching.check_cache(Examined())
    assert found.state == "warning" and "no room" in found.text
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    (found,) = caching.check_cache(Examined())
    assert found.state == "warning"


# ---- stores -------------------------------------------------------------------------------------

MEASURED = {
    "listing": 0.1, "seen": 40, "first": 0.09, "describe": "obstore", "nbytes": 1e5,
    "bytes": [0.03] * 9 + [0.06], "whole": [0.04] * 10,
}  # fmt: skip


def test_latencies_and_littles_law(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "available_cpus", lambda: 2)
    first, second = stores._latencies("s3://bucket/", MEASURED)
    assert "first byte after 30 ms, p90 57 ms" in second.text and "40 objects listed in 100 ms" in first.text
    found = stores._connections(MEASURED, 1000.0)
    assert found.state == "ok" and "2,000/s × 40 ms = 80 at a time" in found.text
    found = stores._connections(MEASURED, 10_000.0)
    assert found.state == "warning" and "has 128 at most" in found.text
    found = stores._connections(MEASURED, None)
    assert "one request at a time brings 25 objects/s" in found.text


@pytest.mark.parametrize(
    "answer", [Answer(None, "it took more than 60 s"), Answer({"error": "StoreError: no"})]
)
def test_a_store_that_does_not_answer(answer: Answer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "ask", lambda *_, **__: answer)
    (found,) = stores.check(Examined(url="s3://bucket/"))
    assert found.state == "problem" and (answer.why or "StoreError: no") in found.text


def doctor(
    url: str, endpoint: str, key: str, secret: str, folder: Path
) -> tuple[int, list[dict[str, Any]], str]:
    """The store's findings as a user gets them: exit code, findings, and all that was printed or written."""
    code = """
import sys
from fastpipe.tools.doctor.examination import CHECKS
for name in set(CHECKS) - {"stores"}:
    del CHECKS[name]
from fastpipe.cli import main
raise SystemExit(main(sys.argv[1:]))
"""
    report = folder / "x.json"
    done = subprocess.run(
        [sys.executable, "-c", code, "doctor", url, "--endpoint-url", endpoint, "--json", str(report)],
        capture_output=True, text=True, check=False,
        env={**os.environ, "AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": secret},
    )  # fmt: skip
    text = report.read_text()
    return done.returncode, json.loads(text)["findings"], done.stdout + done.stderr + text


def test_a_real_store(s3: Any, photo_tree: Path, tmp_path: Path) -> None:
    name = s3.bucket()
    for number, path in enumerate(sorted(photo_tree.rglob("*.jpg"))[:6]):
        s3.put(name, f"train/a/{number}.jpg", path.read_bytes())
    with s3.proxy(Faults(delay_ms=30, jitter_ms=0)) as proxy:
        endpoint = proxy.options["endpoint_url"]
        keys = s3.options["key"], s3.options["secret"]
        code, found, text = doctor(f"s3://{name}/train", endpoint, *keys, tmp_path)
        assert code == 0 and [one["state"] for one in found] == ["ok"] * 3
        assert "a page of 6 objects" in found[0]["text"] and "6 requests of a byte" in found[1]["text"]
        assert keys[1] not in text
        wrong = "hush-this-is-wrong"
        code, found, text = doctor(f"s3://{name}/train", endpoint, keys[0], wrong, tmp_path)
        assert code == 1 and "does not let these credentials in" in found[0]["text"]
        assert wrong not in text
        code, found, _ = doctor(f"s3://{name}/nothing", endpoint, *keys, tmp_path)
        assert code == 0 and [one["state"] for one in found] == ["warning"]
