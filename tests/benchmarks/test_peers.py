"""Peers: where their interpreters are found, what passes between the processes, what each file makes."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from benchmarks.cases.augment import AUGMENT_PEERS
from benchmarks.cases.hdf5 import TABLE_PEERS
from benchmarks.cases.s3 import BUCKET_PEERS
from benchmarks.cases.volume import VOLUME_PEERS
from benchmarks.gpu.sections import decoding_peers
from benchmarks.peers import rows as peers
from benchmarks.peers.children import ffcv, litdata, pillow_simd, protocol, serve, tfdata
from benchmarks.peers.children.protocol import Job, PeerError, Stream, batch_problem
from benchmarks.peers.children.spdl import crop_box
from benchmarks.peers.rows import PEERS, Peer, PeerRow, interpreter
from fastpipe.bench.data import Photos, scan
from fastpipe.bench.runner import ContenderError

OWN = Peer("own", "Own", "own", "make peers-own", environment="two-words", note="a note")


@pytest.fixture(scope="module")
def photos(tree: Path) -> Photos:
    return scan(tree, "photos")


@pytest.fixture
def job(photos: Photos, tmp_path: Path) -> Job:
    return Job(
        folder=str(photos.folder),
        indices=photos.indices,
        files=photos.files,
        labels=photos.labels,
        batch_size=2,
        threads=1,
        side=224,
        mean=(0.485, 0.456, 0.406),
        std=(0.229, 0.224, 0.225),
        output="float32",
        scratch=str(tmp_path),
    )


def batch(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(0).uniform(-1, 1, shape).astype(np.float32)


def test_every_peer_has_its_own_key_and_a_source() -> None:
    assert len({peer.key for peer in PEERS}) == len(PEERS)
    others = (*TABLE_PEERS, *VOLUME_PEERS, *BUCKET_PEERS, *(one.peer for one in AUGMENT_PEERS))
    others = (*others, *decoding_peers("cuda"))
    assert {peer.source for peer in (*PEERS, *others)} == set(serve.SOURCES)
    assert all(bool(peer.module) != bool(peer.environment) for peer in PEERS)


def test_a_peer_of_this_environment_is_found_by_its_module() -> None:
    there = Peer("key", "label", "source", "pip install json", module="json.decoder")
    assert interpreter(there) == sys.executable
    for module in ("nothing_of_that_name", "nothing_of_that_name.inside"):
        assert interpreter(dataclasses.replace(there, module=module)) is None


def test_a_peer_of_its_own_environment_is_found_by_its_folder_or_its_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(OWN.variable, raising=False)
    assert OWN.variable == "FASTPIPE_TWO_WORDS_PYTHON"
    assert interpreter(OWN, [tmp_path]) is None
    python = tmp_path / ".venv-two-words" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    assert interpreter(OWN, [tmp_path / "none", tmp_path]) == str(python)  # the link, not its target
    monkeypatch.setenv(OWN.variable, sys.executable)
    assert interpreter(OWN, [tmp_path]) == sys.executable
    monkeypatch.setenv(OWN.variable, str(tmp_path / "gone"))
    assert interpreter(OWN, [tmp_path]) is None


def fake_child(monkeypatch: pytest.MonkeyPatch, folder: Path, code: str) -> None:
    """Let rows run this code, in which ``job`` is the first line and ``say`` answers."""
    head = (
        "import json, os, sys\n"
        "def say(**message): print(json.dumps(message), flush=True)\n"
        "job = json.loads(sys.stdin.readline())\n"
    )
    (folder / "child.py").write_text(head + code)
    monkeypatch.setattr(peers, "CHILD", folder / "child.py")


def test_a_row_tells_what_its_child_told(
    photos: Photos, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    code = (
        "open(os.path.join(job['scratch'], 'made'), 'w').close()\n"
        "assert job['files'] and job['options'] == {} and 'PYTHONPATH' not in os.environ\n"
        "say(versions={'own': '3.0'}, note=job['output'], prepared_s=1.234,"
        f" prepared_bytes={3 * photos.bytes})\n"
        "for line in sys.stdin: say(seconds=json.loads(line)['batches'] / 10)\n"
    )
    fake_child(monkeypatch, tmp_path, code)
    row = PeerRow(OWN, sys.executable, photos, 4, 1)
    scratch = Path(row._scratch.name)
    assert (scratch / "made").exists()
    info = row.info
    assert info.versions == {"own": "3.0"}
    assert (info.prepared_s, info.prepared_size) == (1.23, 3.0)
    assert info.note == "a note; float32; converted in 1 s to 3.0× the bytes"
    assert row.measure(40) == 1.0
    row.close()
    row.close()
    assert not scratch.exists()


def test_a_child_that_refuses_or_dies_is_reported(
    photos: Photos, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_child(monkeypatch, tmp_path, "say(error='too tired')\n")
    with pytest.raises(ContenderError, match="Own: too tired"):
        PeerRow(OWN, sys.executable, photos, 4, 1)
    fake_child(monkeypatch, tmp_path, "sys.exit('out of words')\n")
    with pytest.raises(ContenderError, match="Own stopped: out of words"):
        PeerRow(OWN, sys.executable, photos, 4, 1)
    with pytest.raises(ContenderError, match="Own does not start"):
        PeerRow(OWN, str(tmp_path / "no-python"), photos, 4, 1)
    monkeypatch.setattr(peers, "_PATIENCE_S", 0.5)
    fake_child(monkeypatch, tmp_path, "import threading\nthreading.Event().wait()\n")
    with pytest.raises(ContenderError, match=r"Own did not answer for 0\.5 s, and was ended: no message"):
        PeerRow(OWN, sys.executable, photos, 4, 1)


def test_an_unknown_source_is_reported_by_the_real_child(photos: Photos) -> None:
    with pytest.raises(ContenderError, match="Own stopped: KeyError: 'own'"):
        PeerRow(OWN, sys.executable, photos, 4, 1)


def test_the_child_needs_neither_fastpipe_nor_what_it_needs() -> None:
    code = (
        "import runpy, sys\n"
        f"found = runpy.run_path({str(peers.CHILD)!r})\n"
        "assert 'main' in found\n"
        "assert not hasattr(sys.modules['fastpipe'], '__version__')\n"
        "assert not {'torch', 'rich', 'platformdirs', 'fastpipe.errors'} & set(sys.modules)\n"
    )
    # -I: no current folder, no PYTHONPATH, by which the real fastpipe could be found.
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_child_measures_until_the_pipe_closes(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    served, paused, ended = [], [], []

    def source(asked: Job) -> Stream:
        def batches() -> Iterator[Any]:
            try:
                while True:
                    served.append(1)
                    yield batch((2, 3, 224, 224)), np.zeros(2, np.int64)
            finally:
                ended.append(1)

        assert asked == dataclasses.replace(job, **{n: list(getattr(job, n)) for n in LISTS})
        return Stream(batches(), 3, ("numpy", "no-such-package"), note="now known", prepared_s=1.0)

    monkeypatch.setitem(serve.SOURCES, "dali", source)
    questions = [dataclasses.asdict(job), {"batches": 3}, {"batches": 1}]
    answers = io.StringIO()
    text = "".join(json.dumps(question) + "\n" for question in questions)
    serve.serve("dali", io.StringIO(text), answers, paused.append)
    first, *times = map(json.loads, answers.getvalue().splitlines())
    assert (first["shape"], first["dtype"]) == ([2, 3, 224, 224], "float32")
    assert first["versions"] == {"numpy": np.__version__}
    assert (first["note"], first["prepared_s"], first["prepared_bytes"]) == ("now known", 1.0, None)
    assert len(times) == 2 and all(answer["seconds"] > 0 for answer in times)
    assert len(served) == 1 + 3 + 1 + 2 * (2 * 3)
    # It rests for as long as three batches take.
    assert paused == pytest.approx([1.2 * 3 * t["seconds"] / n for t, n in zip(times, (3, 1), strict=True)])
    assert ended == [1]


LISTS = ("indices", "files", "labels", "mean", "std")


def test_a_refusal_is_an_answer(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def source(asked: Job) -> Stream:
        raise PeerError("not with these photos")

    monkeypatch.setitem(serve.SOURCES, "dali", source)
    answers = io.StringIO()
    serve.serve("dali", io.StringIO(json.dumps(dataclasses.asdict(job)) + "\n"), answers)
    assert json.loads(answers.getvalue()) == {"error": "not with these photos"}


def test_a_peer_with_a_wrong_batch_is_not_measured(job: Job) -> None:
    right, labels = batch((2, 3, 224, 224)), [0, 1]
    assert batch_problem(job, "NCHW", right, labels) is None
    assert batch_problem(job, "NHWC", right.transpose(0, 2, 3, 1), np.zeros((2, 1))) is None
    assert "float64" in str(batch_problem(job, "NCHW", right.astype(np.float64), labels))
    assert "expected float32" in str(batch_problem(job, "NHWC", right, labels))
    assert "values lie in" in str(batch_problem(job, "NCHW", 255 * right, labels))
    assert "1 labels" in str(batch_problem(job, "NCHW", right, [0]))
    assert "[7]" in str(batch_problem(job, "NCHW", right, [0, 7]))
    as_bytes = dataclasses.replace(job, output="uint8")
    assert batch_problem(as_bytes, "NCHW", (100 + 20 * right).astype(np.uint8), labels) is None
    assert "values lie in" in str(batch_problem(as_bytes, "NCHW", np.zeros(right.shape, np.uint8), labels))


def test_an_endless_order_uses_every_photo_equally(job: Job) -> None:
    drawn = list(itertools.islice(pillow_simd.Endless(job), 3 * len(job.files)))
    assert sorted(drawn) == sorted(3 * list(job.indices))
    assert protocol.repeats(dataclasses.replace(job, batch_size=6)) == protocol.EPOCH_BATCHES


def test_a_reader_of_jpegs_looks_at_the_content(job: Job, tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "png.jpg", format="PNG")
    with pytest.raises(PeerError, match="JPEG only"):
        tfdata.stream(dataclasses.replace(job, files=[*job.files, str(tmp_path / "png.jpg")]))


def test_ffcv_gets_the_photos_as_torchvision_opens_them(job: Job) -> None:
    given = ffcv.Photos(job)
    image, label = given[1]
    assert (len(given), label) == (6, job.labels[1])
    assert np.array_equal(image, Image.open(job.files[1]).convert("RGB"))


def test_the_stored_side_follows_the_median_shape(job: Job, tmp_path: Path) -> None:
    files = []
    for number, size in enumerate([(40, 30), (30, 40), (40, 30), (90, 30), (30, 30)]):
        files.append(str(tmp_path / f"{number}.png"))
        Image.new("RGB", size).save(files[-1])
    assert ffcv.largest_side(dataclasses.replace(job, files=files), 256) == 341


def test_litdata_stores_the_bytes_of_a_jpeg_and_makes_one_of_others(tmp_path: Path, job: Job) -> None:
    Image.new("L", (8, 8), 100).save(tmp_path / "grey.png")
    stored = litdata.sample(job.files, job.labels, 2)
    assert (stored["image"].filename, stored["label"]) == (job.files[2], job.labels[2])
    stored["image"].close()
    made = litdata.sample([str(tmp_path / "grey.png")], [3], 0)
    assert (made["image"].format, made["image"].mode, made["label"]) == ("JPEG", "RGB", 3)


def test_a_strip_gets_the_largest_crop_at_its_centre() -> None:
    assert crop_box(10, 1000, np.random.default_rng(0)) == (0, 493, 10, 13)


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="run it on Linux, where peers run")
@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.key)
def test_a_peer_that_is_installed_works(peer: Peer, photos: Photos) -> None:
    python = interpreter(peer)
    if python is None:
        pytest.skip(f"{peer.label} is not installed: {peer.install}")
    try:
        row = PeerRow(peer, python, photos, 4, 2)
    except ContenderError as error:
        if "apt-get install" in str(error):  # what pip does not bring
            pytest.skip(str(error))
        raise
    assert row.first_batch["versions"]
    assert row.measure(16) > 0
    row.close()
