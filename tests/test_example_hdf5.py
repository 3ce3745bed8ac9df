"""The example ``hdf5_mel``: both scripts learn and judge the same, and differ by the swap alone."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

_FOLDER = Path(__file__).resolve().parents[1] / "examples" / "hdf5_mel"
_NAMES = ("before", "after", "compare", "make_data")


@pytest.fixture(scope="module")
def scripts() -> Any:
    """The scripts, as modules that other tests do not see."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(_FOLDER))
        yield {name: importlib.import_module(name) for name in _NAMES}
        for name in _NAMES:
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def data(scripts: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("mels")
    scripts["make_data"].main(str(folder), files=100)
    return str(folder)


def test_both_learn_and_judge_the_same(
    scripts: Any, data: str, same_generators: None, capsys: pytest.CaptureFixture[str]
) -> None:
    losses, right = scripts["before"].main(data, 2)
    found = scripts["after"].main(data, 2)
    assert found[0] == pytest.approx(losses, abs=1e-5)
    assert found[1] == right
    printed = capsys.readouterr().out
    assert printed.count("samples/s") == 4 and printed.count("of 20 files") == 2


def test_with_the_same_weights_the_votes_are_the_same(
    scripts: Any, data: str, same_generators: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert scripts["compare"].main(data, 1)
    printed = capsys.readouterr().out
    assert "the same votes" in printed
    assert "the swap: 28 lines go, 10 lines come" in printed


def test_the_data_can_be_made_of_wav_files(
    scripts: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import wave

    import numpy as np

    from fastpipe.testing import spoken

    for number in range(50):
        with wave.open(str(tmp_path / f"{number % 10}_somebody_{number}.wav"), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(8000)
            sound = spoken(np.random.default_rng(number), number % 10)
            file.writeframes((sound * 32767).astype("<i2").tobytes())
    scripts["make_data"].main(str(tmp_path / "made"), wav_folder=str(tmp_path))
    assert "train.h5: 40 files" in capsys.readouterr().out
    losses, right = scripts["after"].main(str(tmp_path / "made"), 1)
    assert len(losses) == 1 and 0 <= right <= 1


def test_the_scripts_differ_by_the_swap_alone() -> None:
    before, after = (
        (_FOLDER / f"{name}.py").read_text().split('"""', 2)[2].splitlines() for name in ("before", "after")
    )
    new = [line for line in after if line and line not in before]
    assert len(new) == 8
    assert sum("Fast" in line or "group_batches" in line for line in new) == 5
