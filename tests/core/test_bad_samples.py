"""The errors of bad samples, and the log that counts them."""

from __future__ import annotations

import json
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

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


def test_the_remedy_is_the_causes() -> None:
    assert f"Relative paths begin in {str(Path.cwd())!r}" in str(
        bad_sample_error(ITEM, FileNotFoundError(2, "no"))
    )
    for path in ("/x.jpg", "s3://bucket/x.jpg"):
        assert "Repair or remove" in str(bad_sample_error(Item(0, path, 0), FileNotFoundError(2, "no")))
    cause = ValueError("a box")
    cause.remedy = "Correct the box"  # type: ignore[attr-defined]
    assert "a box. Correct the box, or pass bad_samples=" in str(bad_sample_error(ITEM, cause))


def test_a_pickled_log_counts_for_itself() -> None:
    log = BadSampleLog(BadSamples("skip", max_errors=5))
    _record(log)
    loaded = pickle.loads(pickle.dumps(log))
    assert (log.count, loaded.count) == (1, 0)


def test_lines_of_many_threads_and_of_several_logs_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    logs = [BadSampleLog(BadSamples("skip", log=str(path))) for _ in range(2)]
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda n: _record(logs[n % 2], Item(n, "x" * 300, 0)), range(300)))
    assert sorted(json.loads(line)["index"] for line in path.read_text().splitlines()) == list(range(300))
