"""Peers: where their interpreters are found, what passes between the processes, and that each works."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from scripts import ran

from benchmarks.cases.augment import AUGMENT_PEERS, SINGLE, AugmentChild, TaskRow, wanted_of
from benchmarks.cases.augment_recipes import RECIPES, ArrayBatches, made_motion, made_volumes
from benchmarks.cases.hdf5 import TABLE_PEERS, TablePeerRow
from benchmarks.cases.s3 import BUCKET_PEERS
from benchmarks.cases.volume import VOLUME_PEERS, VolumePeerRow
from benchmarks.gpu.sections import decoding_peers
from benchmarks.peers import rows as peers
from benchmarks.peers.children import protocol, serve
from benchmarks.peers.rows import PEERS, Peer, PeerRow, interpreter
from fastpipe.bench.augment import BANDS, FRAMES, Place
from fastpipe.bench.data import Photos, scan
from fastpipe.bench.hdf5 import made_tables
from fastpipe.bench.runner import ContenderError
from fastpipe.bench.synthetic import mel_rows
from fastpipe.bench.volume import Sizes, made_scroll

OWN = Peer("own", "Own", "own", "make peers-own", environment="two-words", note="a note")


@pytest.fixture(scope="module")
def photos(tree: Path) -> Photos:
    return scan(tree, "photos")


@pytest.fixture
def job(photos: Photos, tmp_path: Path) -> protocol.Job:
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    files = str(photos.folder), photos.indices, photos.files, photos.labels
    return protocol.Job(*files, 2, 1, 224, mean, std, "float32", str(tmp_path))


def test_every_peer_has_its_own_key_and_a_source() -> None:
    assert len({peer.key for peer in PEERS}) == len(PEERS)
    others = (*TABLE_PEERS, *VOLUME_PEERS, *BUCKET_PEERS, *(one.peer for one in AUGMENT_PEERS))
    assert {peer.source for peer in (*PEERS, *others, *decoding_peers("cuda"))} == set(serve.SOURCES)
    assert all(bool(peer.module) != bool(peer.environment) for peer in PEERS)
    hidden = peers._environment(AUGMENT_PEERS[0].peer, "")["CUDA_VISIBLE_DEVICES"]
    assert hidden == "" and AUGMENT_PEERS[-1].peer.is_on_gpu


def test_a_peer_is_found_by_its_module_its_folder_or_its_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Peer("key", "label", "source", "pip install json", module="json.decoder")
    assert interpreter(here) == sys.executable
    assert interpreter(dataclasses.replace(here, module="no_such.inside")) is None
    monkeypatch.delenv(OWN.variable, raising=False)
    assert OWN.variable == "FASTPIPE_TWO_WORDS_PYTHON" and interpreter(OWN, [tmp_path]) is None
    python = tmp_path / ".venv-two-words" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    assert interpreter(OWN, [tmp_path / "none", tmp_path]) == str(python)  # the link, not its target
    monkeypatch.setenv(OWN.variable, sys.executable)
    assert interpreter(OWN, [tmp_path]) == sys.executable
    monkeypatch.setenv(OWN.variable, str(tmp_path / "gone"))
    assert interpreter(OWN, [tmp_path]) is None


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Lets rows run this code, in which ``job`` is the first line and ``say`` answers."""
    head = (
        "import json, os, sys\n"
        "def say(**message): print(json.dumps(message), flush=True)\n"
        "job = json.loads(sys.stdin.readline())\n"
    )

    def run(code: str) -> None:
        (tmp_path / "child.py").write_text(head + code)
        monkeypatch.setattr(peers, "CHILD", tmp_path / "child.py")

    return run


def test_a_row_has_the_facts_of_its_process(
    photos: Photos, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, child: Callable[[str], None]
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    child(
        "open(os.path.join(job['scratch'], 'made'), 'w').close()\n"
        "assert job['files'] and job['options'] == {} and 'PYTHONPATH' not in os.environ\n"
        "say(versions={'own': '3.0'}, note=job['output'], prepared_s=1.234,"
        f" prepared_bytes={3 * photos.bytes})\n"
        "for line in sys.stdin: say(seconds=json.loads(line)['batches'] / 10)\n"
    )
    row = PeerRow(OWN, sys.executable, photos, 4, 1)
    scratch = Path(row._scratch.name)
    assert (scratch / "made").exists()
    info = row.info
    assert info.versions == {"own": "3.0"} and (info.prepared_s, info.prepared_size) == (1.23, 3.0)
    assert info.note == "a note; float32; converted in 1 s to 3.0× the bytes"
    assert row.measure(40) == 1.0
    row.close()
    row.close()
    assert not scratch.exists()


@pytest.mark.few(2)
@pytest.mark.parametrize(("code", "message"), [
    ("say(error='too tired')\n", "Own: too tired"),
    ("sys.exit('out of words')\n", "Own stopped: out of words"),
    ("import signal\nsignal.pause()\n", r"Own did not answer for 5\.5 s, and was ended"),
    (None, "Own stopped: KeyError: 'own'"),  # by the real child
])  # fmt: skip
def test_a_process_that_refuses_dies_or_hangs_is_reported(
    photos: Photos, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, child: Any, code: str | None, message: str
) -> None:  # fmt: skip
    if code is not None:
        child(code)
    monkeypatch.setattr(peers, "_PATIENCE_S", 5.5)
    with pytest.raises(ContenderError, match=message):
        PeerRow(OWN, sys.executable, photos, 4, 1)
    with pytest.raises(ContenderError, match="Own does not start"):
        PeerRow(OWN, str(tmp_path / "no-python"), photos, 4, 1)


def test_the_child_needs_neither_fastpipe_nor_its_dependencies() -> None:
    code = (
        "import runpy, sys\n"
        f"found = runpy.run_path({str(peers.CHILD)!r})\n"
        "assert 'main' in found\n"
        "assert not hasattr(sys.modules['fastpipe'], '__version__')\n"
        "assert not {'torch', 'rich', 'platformdirs', 'fastpipe.errors'} & set(sys.modules)\n"
    )
    # -I: no current folder, no PYTHONPATH, by which the real fastpipe could be found.
    done = ran("-I", "-c", code)
    assert done.returncode == 0, done.stderr


def served(source: str, lines: list[Any], rest: Callable[[float], Any] = lambda seconds: None) -> list[Any]:
    """The answers of a child to these lines."""
    answers, text = io.StringIO(), "".join(json.dumps(line) + "\n" for line in lines)
    serve.serve(source, io.StringIO(text), answers, rest)
    return [json.loads(line) for line in answers.getvalue().splitlines()]


def test_the_child_measures_until_the_pipe_closes(job: protocol.Job, monkeypatch: pytest.MonkeyPatch) -> None:
    made, paused, ended = [], [], []

    def batches() -> Iterator[Any]:
        try:
            while True:
                made.append(1)
                yield np.random.default_rng(0).uniform(-1, 1, (2, 3, 224, 224)).astype("f4"), np.zeros(2, int)
        finally:
            ended.append(1)

    def source(asked: protocol.Job) -> protocol.Stream:
        assert dataclasses.asdict(asked) == json.loads(json.dumps(dataclasses.asdict(job)))
        if len(made) > 9:
            raise protocol.PeerError("not with these photos")
        return protocol.Stream(batches(), 3, ("numpy", "no-such-package"), note="now known", prepared_s=1.0)

    monkeypatch.setitem(serve.SOURCES, "dali", source)
    lines = [dataclasses.asdict(job), {"batches": 3}, {"batches": 1}]
    first, *times = served("dali", lines, paused.append)
    assert (first["shape"], first["dtype"]) == ([2, 3, 224, 224], "float32")
    assert first["versions"] == {"numpy": np.__version__}
    assert (first["note"], first["prepared_s"], first["prepared_bytes"]) == ("now known", 1.0, None)
    assert len(times) == 2 and all(answer["seconds"] > 0 for answer in times)
    assert len(made) == 1 + 3 + 1 + 2 * (2 * 3) and ended == [1]
    # It rests for as long as three batches take.
    assert paused == pytest.approx([1.2 * 3 * t["seconds"] / n for t, n in zip(times, (3, 1), strict=True)])
    assert served("dali", lines[:1]) == [{"error": "not with these photos"}]


def test_a_peer_with_a_wrong_batch_is_not_measured(job: protocol.Job) -> None:
    right, labels = np.random.default_rng(0).uniform(-1, 1, (2, 3, 224, 224)).astype(np.float32), [0, 1]
    as_bytes = dataclasses.replace(job, output="uint8")
    half = [0.5] * 3
    changed: Any = protocol.AugmentJob("", "", "", "", ["a"], 2, 8, half, half, 10, 1, "cpu", "", {})
    table: Any = protocol.TableJob("", "x", (70, 64, 128), "float32", 16, 2, 8, 2, "")
    volume: Any = protocol.VolumeJob("", "", [32, 64, 64], [10, 20, 20], 2, 1, 32, 1000, False, "", {})
    small, rows = right[:, :, :8, :8], np.zeros((8, 64, 128), "f4")
    patch = np.zeros((2, 10, 20, 20), np.uint16)
    found = [
        (protocol.batch_problem(job, "NCHW", right, labels), None),
        (protocol.batch_problem(job, "NHWC", right.transpose(0, 2, 3, 1), np.zeros((2, 1))), None),
        (protocol.batch_problem(job, "NCHW", right.astype(np.float64), labels), "float64"),
        (protocol.batch_problem(job, "NHWC", right, labels), "expected float32"),
        (protocol.batch_problem(job, "NCHW", 255 * right, labels), "values lie in"),
        (protocol.batch_problem(job, "NCHW", right, [0]), "1 labels"),
        (protocol.batch_problem(job, "NCHW", right, [0, 7]), "[7]"),
        (protocol.batch_problem(as_bytes, "NCHW", (100 + 20 * right).astype(np.uint8), labels), None),
        (protocol.batch_problem(as_bytes, "NCHW", np.zeros(right.shape, np.uint8), labels), "values lie in"),
        *((protocol.augment_problem(changed, "one", one), words) for one, words in (
            (small, None), (small[:, 0], None), (small.astype(np.uint8), "one: a batch is uint8"),
            (small[:1], "expected float32 of 2 samples"), (small[..., 1:], "expected 8×8"),
            (small + np.nan, "not finite"),
        )),
        (protocol.table_problem(table, rows), None),
        (protocol.table_problem(table, rows.astype(float)), "float64"),
        (protocol.table_problem(table, rows[1:]), "(7, 64, 128)"),
        (protocol.volume_problem(volume, patch, patch), None),
        (protocol.volume_problem(volume, patch[:1], patch), "values of (1, 10, 20, 20)"),
        (protocol.volume_problem(volume, patch, patch[..., 1:]), "labels of (2, 10, 20, 19)"),
    ]  # fmt: skip
    for problem, words in found:
        assert problem is None if words is None else words in str(problem)
    for one in (changed, table, volume):
        assert type(protocol.job_of(json.loads(json.dumps(dataclasses.asdict(one))))) is type(one)


def installed(peer: Peer) -> str:
    """The interpreter of a peer, or the test is left out."""
    python = interpreter(peer)
    if python is None:
        pytest.skip(f"{peer.label} is not installed: {peer.install}")
    return python


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="run it on Linux, where peers run")
@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.key)
def test_a_peer_of_images_works(peer: Peer, photos: Photos) -> None:
    try:
        row = PeerRow(peer, installed(peer), photos, 4, 2)
    except ContenderError as error:
        if "apt-get install" in str(error):  # what pip does not bring
            pytest.skip(str(error))
        raise
    assert row.first_batch["versions"] and row.measure(16) > 0
    row.close()


@pytest.mark.parametrize("peer", TABLE_PEERS, ids=lambda peer: peer.key)
def test_a_peer_of_tables_works_and_says_what_it_cannot_read(peer: Peer, tmp_path: Path) -> None:
    python, table = installed(peer), made_tables(70, tmp_path)[0]
    row = TablePeerRow(peer, python, table, 8, 2)
    assert row.info.versions and row.measure(row.chunk) > 0
    row.close()
    with h5py.File(tmp_path / "none.h5", "w"):
        pass
    with pytest.raises(ContenderError, match=peer.label):
        TablePeerRow(peer, python, dataclasses.replace(table, path=tmp_path / "none.h5"), 8, 2)


@pytest.mark.few(2)
@pytest.mark.parametrize("peer", VOLUME_PEERS, ids=lambda peer: peer.key)
def test_a_peer_of_volumes_cuts_its_patches_and_no_others(
    peer: Peer, tmp_path: Path, child: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = peers.CHILD
    scroll = made_scroll(Sizes((32, 64, 64), (16, 32, 32), (10, 20, 20)), tmp_path)
    patches = "[{'start': [0, 0, 0], 'digests': ['00', '00']}]"
    child(f"say(patches={patches}, versions={{}}, note='')\nsys.stdin.read()\n")
    with pytest.raises(ContenderError, match="1 of its first 1 patches are not those of the volume"):
        VolumePeerRow(peer, sys.executable, scroll, 2, 2)
    monkeypatch.setattr(peers, "CHILD", real)
    row = VolumePeerRow(peer, installed(peer), scroll, 2, 2)
    assert row.info.versions and row.measure(2 * row.chunk) > 0
    row.close()


@pytest.mark.few(1)
@pytest.mark.parametrize("number", range(8), ids=lambda number: AUGMENT_PEERS[number].peer.key)
def test_a_peer_of_augmentation_does_its_tasks(number: int, tmp_path: Path) -> None:
    one, rng = AUGMENT_PEERS[number], np.random.default_rng(0)
    photos, mels = rng.integers(0, 256, (3, 3, 224, 224), np.uint8), mel_rows(rng, 3, (BANDS, FRAMES))
    volumes, motion = made_volumes(rng, 2, (12, 16, 16)), made_motion(rng, 5, (20, 25, 3))
    batches = ArrayBatches("noise", photos, mels, *volumes, *motion)
    places = wanted_of(
        one, [Place(recipe, dtype) for recipe in (*RECIPES, *SINGLE) for dtype in recipe.dtypes]
    )
    child = AugmentChild(one, installed(one.peer), batches.save(tmp_path), places, len(batches), 1)
    assert places
    for place in places:
        info = child.told(one.info(place))
        assert info.versions and one.peer.module in info.versions
        row = TaskRow(info.key, child, place.task, batches.count(place.recipe.unit))
        assert row.measure(row.chunk) > 0
        row.close()
    if one.peer.module == "kornia":  # others do their one recipe, whatever it is called
        with pytest.raises(ContenderError, match="strange-uint8: KeyError"):
            child.measure_task("strange-uint8", 1)
    child.close()
