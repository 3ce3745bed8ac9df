"""The errors of bad samples, and the log that counts them."""

from __future__ import annotations

import json
import logging
import pickle
import threading
from pathlib import Path

import pytest

from fastpipe.core.bad_samples import BadSampleLog, Item, bad_sample_error
from fastpipe.errors import BadSampleError, FastpipeError, TooManyBadSamplesError
from fastpipe.options import BadSamples

ITEM = Item(7, "some/where.jpg", 3)


def _record(log: BadSampleLog, item: Item = ITEM) -> None:
    log.record(item, bad_sample_error(item, ValueError("broken bits")))


def test_the_error_names_the_sample_the_cause_and_the_remedy() -> None:
    error = bad_sample_error(ITEM, ValueError("broken bits"))
    for part in ("7", "'some/where.jpg'", "ValueError", "broken bits", "bad_samples='replace'"):
        assert part in str(error)
    assert (error.path, error.index) == ("some/where.jpg", 7)
    assert isinstance(error.__cause__, ValueError)
    assert isinstance(error, FastpipeError) and isinstance(error, OSError)
    for kind in (BadSampleError, TooManyBadSamplesError):
        loaded = pickle.loads(pickle.dumps(kind("a text", path="p.jpg", index=4)))
        assert type(loaded) is kind
        assert (str(loaded), loaded.path, loaded.index) == ("a text", "p.jpg", 4)


@pytest.mark.parametrize(("policy", "word"), [("skip", "left out"), ("replace", "replaced")])
def test_each_bad_sample_is_counted_and_warned_about_once(
    caplog: pytest.LogCaptureFixture, policy: str, word: str
) -> None:
    log = BadSampleLog(BadSamples.of(policy))
    with caplog.at_level(logging.WARNING, "fastpipe.bad_samples"):
        for index in (1, 2, 1, 1, 3):
            _record(log, Item(index, f"{index}.jpg", 0))
    assert log.count == len(caplog.records) == 3
    assert all(word in text and f"{n}.jpg" in text for n, text in enumerate(caplog.messages, 1))
    loaded = pickle.loads(pickle.dumps(log))
    assert loaded.count == 0, "a pickled log counts for itself"
    _record(loaded)
    assert (log.count, loaded.count) == (3, 1)


def test_the_file_gets_one_json_line_for_each_sample(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"from": "before"}\n')
    log = BadSampleLog(BadSamples("replace", log=path))
    for index in (4, 5, 4):
        _record(log, Item(index, f"weird \n name ÿ{index}.jpg", 1))
    common = {"target": 1, "action": "replace", "error": "ValueError('broken bits')"}
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"from": "before"},
        *({"index": index, "path": f"weird \n name ÿ{index}.jpg", **common} for index in (4, 5)),
    ]
    with pytest.raises(FileNotFoundError, match="missing"):
        _record(BadSampleLog(BadSamples("skip", log=tmp_path / "missing" / "bad.jsonl")))


def test_lines_of_many_threads_and_of_several_logs_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    logs = [BadSampleLog(BadSamples("skip", log=str(path))) for _ in range(2)]

    def work(me: int) -> None:
        for number in range(50):
            _record(logs[me % 2], Item(me * 100 + number, "x" * 300, 0))

    threads = [threading.Thread(target=work, args=(me,)) for me in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    found = sorted(json.loads(line)["index"] for line in path.read_text().splitlines())
    assert found == sorted(me * 100 + number for me in range(6) for number in range(50))


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_one_sample_more_than_the_budget_is_an_error(limit: int) -> None:
    log = BadSampleLog(BadSamples("skip", max_errors=limit))
    for index in range(limit):
        for _ in range(2):
            _record(log, Item(index, "x.jpg", 0))
    with pytest.raises(TooManyBadSamplesError, match=f"max_errors={limit}") as caught:
        _record(log, Item(99, "last.jpg", 0))
    assert (caught.value.path, caught.value.index) == ("last.jpg", 99)
    assert isinstance(caught.value.__cause__, ValueError)
