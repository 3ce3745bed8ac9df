"""The example ``imagefolder_resnet``: its data, and the comparison of both scripts over seeds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from fastpipe.bench.synthetic import photo_tree
from fastpipe.torch import split as splitting

EXAMPLE = "imagefolder_resnet"


@pytest.mark.slow
def test_both_train_from_one_seed_to_an_accuracy(
    scripts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(splitting, "measured", lambda *given: splitting.Costs(2.0, 1.0))
    scripts["make_data"].main(str(tmp_path), 5)
    images = sorted(tmp_path.rglob("*.jpg"))
    assert len(images) == 5 * (5 + 2) and set(map(_size, images)) == {(160, 160)}
    loader = scripts["after"].training_data(str(tmp_path / "train"), 32)
    assert "ColorJitter" in str(loader.plan) and "the transform is split" in str(loader.plan)
    found = scripts["compare"].main(str(tmp_path), 1, 1)
    assert set(found) == {"before.py", "after.py"}
    assert all(len(values) == 1 and 0 <= values[0] <= 1 for values in found.values())
    assert capsys.readouterr().out.count("; mean ") == 2


def _size(path: Path) -> tuple[int, int]:
    with Image.open(path) as image:
        return image.size


@pytest.mark.slow
@pytest.mark.parametrize("steps", [2, 20])
def test_both_scripts_learn_the_same(scripts: Any, steps: int, photos: Path, tmp_path: Path) -> None:
    # Few photographs, as nearly all the time goes into the model.
    folder = photos if steps > 2 else photo_tree(tmp_path, classes=2, per_class=4)
    before, after = (scripts[name].main(str(folder), steps, plain=True) for name in ("before", "after"))
    assert len(before) == steps and after == pytest.approx(before, abs=1e-5)
