"""What is said, and what is written."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from fastpipe.bench.check import Check
from fastpipe.tools.comparison import Chain, Failure, Outcome, _add, _Try
from fastpipe.tools.verify import content, print_outcome, sentence

FOLDER = Path("/data/photos")
CHAIN = Chain("eval", "Resize(256)", None, 32)


def path(index: int) -> str:
    return str(FOLDER / f"{index}.jpg")


def check_of(*gaps: float, kind: type = np.uint8) -> Check:
    """One image of 100 values for each gap, which is that of its first value."""
    check = Check()
    for index, gap in enumerate(gaps):
        expected, got = np.full(100, 9, kind), np.full(100, 9, kind)
        got[0] += kind(gap)
        check.add([(expected, got)], index, path(index))
    return check


def outcome_of(check: Check | None = None, **more: object) -> Outcome:
    return Outcome(10, 2, 7, check=check or check_of(0, 0), **more)  # type: ignore[arg-type]


def failures(
    count: int, stock: str | None = "OSError: no", fast: str | None = "OSError: no"
) -> list[Failure]:
    return [Failure(index, path(index), stock, fast) for index in range(count)]


def printed(outcome: Outcome, **options: object) -> str:
    text = io.StringIO()
    print_outcome(outcome, CHAIN, FOLDER, Console(file=text, width=60, **options))  # type: ignore[arg-type]
    return text.getvalue()


@pytest.mark.parametrize(
    ("outcome", "text"),
    [
        (outcome_of(), "Equal: FastImageFolder gives what ImageFolder gives, to the last bit, for 2 images."),
        (outcome_of(unreadable=failures(1)), "Equal: FastImageFolder gives what ImageFolder gives, to the last bit, for 2 images. 1 file can be read by neither."),
        (outcome_of(check_of(0, 3)), "Different: 1 of 2 images differs by up to 3 of 255."),
        (outcome_of(check_of(1, 1)), "Different: 2 of 2 images differ by up to 1 of 255, as if rounded in another way."),
        (outcome_of(check_of(0, 0.5, kind=np.float32)), "Different: 1 of 2 images differs by up to 0.5."),
        (outcome_of(one_sided=failures(2, None)), "Different: 2 images fail with one of the two only."),
        (outcome_of(index_problems={"classes": "no"}), "Different: the two do not list the same samples, so no image was compared."),
    ],
)  # fmt: skip
def test_the_sentence(outcome: Outcome, text: str) -> None:
    assert sentence(outcome) == text
    assert printed(outcome).splitlines()[-1] == text


def test_figures_and_the_worst_files() -> None:
    text = printed(outcome_of(check_of(0, 1, 2, 3, 4, 5, 6, 0)))
    lines = dict(line.split("  ", 1) for line in text.splitlines()[:10])
    figures = {name: value.strip() for name, value in lines.items()}
    assert figures["images"] == "7 of 10 in 2 classes"
    assert figures["values equal"] == "99.250000%"
    assert figures["off by more than 1"] == "0.625000%"
    assert figures["largest difference"] == "6 of 255"
    assert "Images that differ (5 of 6), the worst first\n  6.jpg (sample 6): 6 of 255\n" in text
    assert "1.jpg" not in text


def test_what_cannot_be_compared_is_worst() -> None:
    check = check_of(0, 200)
    check.add_unlike("tensor (1,) instead of (2,)", 7, path(7))
    text = printed(outcome_of(check))
    assert "first\n  7.jpg (sample 7): tensor (1,) instead of (2,)\n  1.jpg (sample 1): 200 of 255\n" in text


def test_failures_are_counted_and_the_first_named() -> None:
    text = printed(outcome_of(unreadable=failures(7), one_sided=failures(1, "OSError: a", None)))
    assert "unreadable              7 files that neither can read" in text
    assert "failing with one only   1 file\n" in text
    assert "Files that fail with one of the two only\n  0.jpg (sample 0): ImageFolder: OSError: a\n" in text
    assert "Files that neither can read (5 of 7)\n  0.jpg (sample 0): OSError: no\n" in text
    assert "4.jpg" in text and "5.jpg" not in text


def test_of_an_index_that_differs_the_problems_are_shown() -> None:
    text = printed(outcome_of(index_problems={"classes": "FastImageFolder.classes is …"}))
    assert "class_to_idx, samples, targets equal" in text
    assert "Not equal\n  FastImageFolder.classes is …\n" in text
    assert "largest difference" not in text


def test_plain_where_it_is_no_terminal() -> None:
    outcome = outcome_of(check_of(0, 3))
    assert "\x1b" not in printed(outcome)
    assert "\x1b" in printed(outcome, force_terminal=True)
    assert not [line for line in printed(outcome).splitlines() if line != line.rstrip()]


def test_paths_are_not_broken_nor_read_as_markup() -> None:
    check = Check()
    check.add_unlike("note", 0, str(FOLDER / ("[red]:x:" * 20 + ".jpg")))
    assert f"  {'[red]:x:' * 20}.jpg (sample 0): note\n" in printed(outcome_of(check))


def test_json_has_it_all() -> None:
    check = check_of(0, 3)
    check.add_unlike("label 1 instead of 0", 5, path(5))
    made = content(outcome_of(check, unreadable=failures(7), one_sided=failures(1, None)), CHAIN, FOLDER, 4)
    assert json.loads(json.dumps(made, allow_nan=False)) == made
    assert (made["schema"], made["equal"], made["seed"], made["classes"]) == (1, False, 4, 2)
    assert made["images"] == {"total": 10, "chosen": 7, "compared": 3, "differing": 2}
    assert made["values"] == {"compared": 200, "differing": 1, "over_one": 1, "largest": 3, "unit": "of 255"}
    assert made["worst"] == [
        {"index": 5, "path": path(5), "largest": None, "note": "label 1 instead of 0"},
        {"index": 1, "path": path(1), "largest": 3, "note": ""},
    ]
    assert made["unreadable"]["count"] == len(made["unreadable"]["files"]) == 7
    assert made["one_sided"]["files"][0]["torchvision"] is None
    assert made["index"] == dict.fromkeys(("classes", "class_to_idx", "samples", "targets"), "equal")
    assert made["text"].startswith("Different")


def test_json_knows_no_infinity() -> None:
    check = check_of(0, float("nan"), kind=np.float32)
    made = content(outcome_of(check), CHAIN, FOLDER, 0)
    json.dumps(made, allow_nan=False)
    assert made["values"]["largest"] is None and made["values"]["unit"] == "absolute"
    assert "inf" in sentence(outcome_of(check))


def test_of_very_many_failures_only_the_number_is_kept() -> None:
    outcome = outcome_of()
    for index in range(1500):
        _add(outcome, path(index), index, _Try(error="OSError: no"), _Try(error="OSError: no"))
    told = content(outcome, CHAIN, FOLDER, 0)["unreadable"]
    assert (told["count"], len(told["files"])) == (1500, 1000)
    assert len(set(map(id, outcome.unreadable))) == 1001
