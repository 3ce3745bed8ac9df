"""``fastpipe doctor`` of folders and stores: what is measured of them."""

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

from fastpipe.tools.doctor import DoctorReport, examination, storage, stores
from fastpipe.tools.doctor.child import Answer
from fastpipe.tools.doctor.report import Examined
from fastpipe.tools.doctor.storage import Rate, _read_many, _sample
from fastpipe.tools.folders import FileSystem, file_system

EVERYTHING: Any = {"seconds": 60.0, "nbytes": 1 << 40}


def test_files_that_can_be_read_are_read_once_within_time_and_bytes(
    photo_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = _sample(str(photo_tree))
    for threads, past_cache in ((1, False), (7, True)):
        rate = _read_many(found.files, threads, past_cache=past_cache, **EVERYTHING)
        assert (rate.files, rate.nbytes) == (24, sum(found.nbytes))
        assert rate.missed is None or 0 <= rate.missed <= 1
        assert _read_many(found.files, threads, seconds=-1.0, nbytes=1 << 40, past_cache=False).files == 0
    assert _read_many(found.files, 1, seconds=60.0, nbytes=1, past_cache=False).files == 1
    (tmp_path / "a.jpg").write_bytes(b"1234")
    (tmp_path / "a.jpg").write_bytes(b"1234")
    (tmp_path / "link.jpg").symlink_to("nowhere")
    write_fifo(tmp_path)
    found = _sample(str(tmp_path))
    assert found.files == (str(tmp_path / "a.jpg"),) and found.is_all
    gone = (*found.files, str(tmp_path / "gone.jpg"))
    assert _read_many(gone, 2, past_cache=True, **EVERYTHING).files == 1
    for number in range(29):
        (tmp_path / f"{number:02}").write_bytes(b"x")
    monkeypatch.setattr(storage, "_MOST_FILES", 10)
    found = _sample(str(tmp_path))
    assert len(found.files) == 10 and found.walked == 30 and not found.is_all


def test_file_systems_that_answer_from_elsewhere_are_a_warning(tmp_path: Path) -> None:
    for kind in ("ext4", "overlay", "tmpfs", ""):
        assert storage._kind("/data", FileSystem(kind, 0)).state == "ok"
    for kind in ("nfs4", "fuse.s3fs", "fuse", "lustre", "virtiofs"):
        found = storage._kind("/data", FileSystem(kind, 0))
        assert found.state == "warning" and "stage=" in found.remedy
        assert kind != "fuse.s3fs" or "s3://" in found.remedy
    device = os.stat(tmp_path).st_dev
    mounts = f"30 23 {os.major(device)}:{os.minor(device)} / {tmp_path} rw - fuse.rclone bucket:secret rw\n"
    assert file_system(str(tmp_path), mounts).kind == "fuse.rclone" and file_system(str(tmp_path)).free > 0


def test_a_folder_or_a_file_is_measured(photo_tree: Path, tmp_path: Path) -> None:
    def texts_of(folder: Path) -> list[str]:
        return [one.text for one in storage.check(Examined(folder=str(folder)))]

    examined = Examined(folder=str(photo_tree), name="photos")
    texts = [one.text for one in storage.check(examined)]
    assert texts[0].startswith("photos is on ") and "examined 24 files" in texts[1]
    assert any("16 threads" in text for text in texts) and len(examined.photos) == 24
    assert any("no file" in text for text in texts_of(tmp_path))
    (tmp_path / "x.h5").write_bytes(bytes(5 << 20))
    assert any("one file in order" in text for text in texts_of(tmp_path / "x.h5"))
    folder = tmp_path / os.fsdecode(b"data\xff")
    folder.mkdir()
    (folder / "a.jpg").write_bytes(b"1234")
    examined = examination._examined(folder, {})
    report = DoctorReport(tuple(storage.check(examined)), examined.name)
    assert "data\\xff is on" in str(report) and "data\\\\xff" in report.json()
    for missed, text in ((1.0, "from the disk"), (0.0, "100% stayed in memory"), (None, "after dropping")):
        assert text in storage._past(Rate(1, 1, 1.0, missed))


def test_the_cache_folder_is_examined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "not" / "yet"))
    (found,) = storage.check_cache(Examined())
    assert str(tmp_path / "not" / "yet") in found.text and not (tmp_path / "not").exists()
    for kind, free, text in (("nfs", 1 << 40, "XDG_CACHE_HOME"), ("ext4", 1 << 20, "no room")):
        monkeypatch.setattr(storage, "file_system", lambda _, kind=kind, free=free: FileSystem(kind, free))
        (found,) = storage.check_cache(Examined())
        assert found.state == "warning" and text in found.text + found.remedy
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    (found,) = storage.check_cache(Examined())
    assert found.state == "warning"


def test_latencies_of_a_store_are_compared_with_what_decoders_need(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = {"listing": 0.1, "seen": 40, "first": 0.09, "describe": "obstore", "nbytes": 1e5,
                "bytes": [0.03] * 9 + [0.06], "whole": [0.04] * 10}  # fmt: skip
    monkeypatch.setattr(stores, "available_cpus", lambda: 2)
    first, second = stores._latencies("s3://bucket/", measured)
    assert "first byte after 30 ms, p90 57 ms" in second.text and "40 objects listed in 100 ms" in first.text
    for images_s, state, text in (
        (1000.0, "ok", "2,000/s × 40 ms = 80 at a time"),
        (10_000.0, "warning", "has 128 at most"),
        (None, "ok", "one request at a time brings 25 objects/s"),
    ):
        found = stores._connections(measured, images_s)
        assert found.state == state and text in found.text
    for answer, text in (
        (Answer(None, "it took more than 60 s"), "it took more than 60 s"),
        (Answer({"error": "StoreError: no"}), "StoreError: no"),
    ):
        monkeypatch.setattr(stores, "ask", lambda *_, **__: answer)
        (found,) = stores.check(Examined(url="s3://bucket/"))
        assert found.state == "problem" and text in found.text


ONLY_STORES = """
import sys
from fastpipe.tools.doctor.examination import CHECKS
for name in set(CHECKS) - {"stores"}:
    del CHECKS[name]
from fastpipe.cli import main
raise SystemExit(main(sys.argv[1:]))
"""


def test_a_real_store_is_measured_and_no_secret_is_shown(s3: Any, photo_tree: Path, tmp_path: Path) -> None:
    name, report, key = s3.bucket(), tmp_path / "x.json", s3.options["key"]
    for number, path in enumerate(sorted(photo_tree.rglob("*.jpg"))[:6]):
        s3.put(name, f"train/a/{number}.jpg", path.read_bytes())
    with s3.proxy(Faults(delay_ms=30, jitter_ms=0)) as proxy:

        def doctor(folder: str, secret: str = s3.options["secret"]) -> tuple[int, list[dict[str, Any]]]:
            """Exit code and findings, as a user gets them."""
            arguments = [f"s3://{name}/{folder}", "--endpoint-url", proxy.options["endpoint_url"]]
            done = subprocess.run(
                [sys.executable, "-c", ONLY_STORES, "doctor", *arguments, "--json", str(report)],
                capture_output=True, text=True, check=False,
                env={**os.environ, "AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": secret},
            )  # fmt: skip
            assert secret not in done.stdout + done.stderr + report.read_text()
            return done.returncode, json.loads(report.read_text())["findings"]

        code, found = doctor("train")
        assert code == 0 and [one["state"] for one in found] == ["ok"] * 3
        assert "a page of 6 objects" in found[0]["text"] and "6 requests of a byte" in found[1]["text"]
        code, found = doctor("train", "hush-this-is-wrong")
        assert code == 1 and "refuses these credentials" in found[0]["text"]
        code, found = doctor("nothing")
        assert code == 0 and [one["state"] for one in found] == ["warning"]
