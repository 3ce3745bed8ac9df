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


def _error(item: Item = ITEM) -> BadSampleError:
    return bad_sample_error(item, ValueError("broken bits"))


def test_the_error_names_the_sample_the_cause_and_the_remedy() -> None:
    error = _error()
    for part in ("7", "'some/where.jpg'", "ValueError", "broken bits", "bad_samples='replace'"):
        assert part in str(error)
    assert (error.path, error.index) == ("some/where.jpg", 7)
    assert isinstance(error.__cause__, ValueError)
    assert isinstance(error, FastpipeError)
    assert isinstance(error, OSError)


@pytest.mark.parametrize("kind", [BadSampleError, TooManyBadSamplesError])
def test_the_error_survives_pickling(kind: type[BadSampleError]) -> None:
    loaded = pickle.loads(pickle.dumps(kind("what", path="p.jpg", index=4)))
    assert type(loaded) is kind
    assert (str(loaded), loaded.path, loaded.index) == ("what", "p.jpg", 4)


def test_different_samples_are_counted_once() -> None:
    log = BadSampleLog(BadSamples("skip"))
    for index in (1, 2, 1, 1, 3):
        log.record(Item(index, f"{index}.jpg", 0), _error())
    assert log.count == 3


@pytest.mark.parametrize(("policy", "word"), [("skip", "left out"), ("replace", "replaced")])
def test_a_new_bad_sample_is_warned_about_once(
    caplog: pytest.LogCaptureFixture, policy: str, word: str
) -> None:
    log = BadSampleLog(BadSamples.of(policy))
    with caplog.at_level(logging.WARNING, "fastpipe.bad_samples"):
        log.record(ITEM, _error())
        log.record(ITEM, _error())
    assert len(caplog.records) == 1
    assert word in caplog.text
    assert "some/where.jpg" in caplog.text


def test_the_file_gets_one_json_line_for_each_sample(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"from": "before"}\n')
    log = BadSampleLog(BadSamples("replace", log=path))
    for index in (4, 5, 4):
        item = Item(index, f"weird \n name ÿ{index}.jpg", 1)
        log.record(item, bad_sample_error(item, OSError("bad")))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [
        {"from": "before"},
        *(
            {
                "index": index, "path": f"weird \n name ÿ{index}.jpg", "target": 1,
                "action": "replace", "error": "OSError('bad')",
            }
            for index in (4, 5)
        ),
    ]  # fmt: skip


def test_lines_of_many_threads_and_of_several_logs_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    logs = [BadSampleLog(BadSamples("skip", log=str(path))) for _ in range(2)]

    def work(me: int) -> None:
        for number in range(50):
            item = Item(me * 100 + number, "x" * 300, 0)
            logs[me % 2].record(item, bad_sample_error(item, OSError("bad")))

    threads = [threading.Thread(target=work, args=(me,)) for me in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    found = sorted(json.loads(line)["index"] for line in path.read_text().splitlines())
    assert found == sorted(me * 100 + number for me in range(6) for number in range(50))


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_the_budget(limit: int) -> None:
    log = BadSampleLog(BadSamples("skip", max_errors=limit))
    for index in range(limit):
        log.record(Item(index, "x.jpg", 0), _error())
        log.record(Item(index, "x.jpg", 0), _error())
    with pytest.raises(TooManyBadSamplesError, match=f"max_errors={limit}") as caught:
        log.record(Item(99, "last.jpg", 0), _error())
    assert (caught.value.path, caught.value.index) == ("last.jpg", 99)
    assert "some/where.jpg" in str(caught.value)
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_log_that_cannot_be_written_is_an_error_that_names_it(tmp_path: Path) -> None:
    log = BadSampleLog(BadSamples("skip", log=tmp_path / "missing" / "bad.jsonl"))
    with pytest.raises(FileNotFoundError, match="missing"):
        log.record(ITEM, _error())


def test_a_pickled_log_counts_for_itself() -> None:
    log = BadSampleLog(BadSamples("skip", max_errors=5))
    log.record(ITEM, _error())
    loaded = pickle.loads(pickle.dumps(log))
    assert (log.count, loaded.count) == (1, 0)
    loaded.record(ITEM, _error())
    assert loaded.count == 1
