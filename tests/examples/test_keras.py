"""The example ``keras_multimodal``: both scripts have the same batches and losses, and differ by the swap.

TensorFlow runs in processes of its own: of one where it runs no other test can fork.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

_FOLDER = Path(__file__).resolve().parents[2] / "examples" / "keras_multimodal"
_ROWS, _BATCH = 18, 6
_MODALITIES = ("depth_rgb", "depth_map", "thermal_rgb", "thermal_map")

_NEEDED = {"tensorflow": "tensorflow-cpu", "pandas": "pandas", "sklearn": "scikit-learn"}
pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"needs {name}: pip install {package}")
    for name, package in _NEEDED.items()
]


def _script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"keras_multimodal_{name}", _FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, settled: Any) -> str:
    folder = tmp_path_factory.mktemp("wounds")
    _script("make_data").main(str(folder), _ROWS)
    return str(settled(folder))


def _beside(*calls: tuple[Any, ...]) -> list[Any]:
    """What functions of this file print as JSON, each in a process of its own, at the same time."""
    from scripts import started  # here: those processes do not find it

    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    running = [started(__file__, function.__name__, *given, env=env) for function, *given in calls]
    try:
        said = [process.communicate(timeout=150) for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    for process, (_, err) in zip(running, said, strict=True):
        assert process.returncode == 0, err[-3000:]
    return [json.loads(out.splitlines()[-1]) for out, _ in said]


def _scripts() -> tuple[Any, Any]:
    before, after = _script("before"), _script("after")
    before.BATCH = after.BATCH = _BATCH
    return before, after


def _table(script: Any, data: str) -> Any:
    """With numbers where the forests' probabilities will be."""
    table = script.read_table(data)
    made = {name: np.linspace(0, place, len(table)) for place, name in enumerate(script.FORESTS)}
    return table.assign(**made)


def compare_batches(data: str) -> Any:
    """Which tensors of both scripts' batches are not the same, bit for bit; and how many were compared."""
    import tensorflow as tf

    before, after = _scripts()
    table, different, count = _table(before, data), [], 0
    for fold in range(before.FOLDS):
        for part in (table[table["fold"] != fold], table[table["fold"] == fold]):
            found = [list(script.dataset(part, data, _MODALITIES)) for script in (before, after)]
            for number, pair in enumerate(zip(*found, strict=True)):
                tf.nest.assert_same_structure(*pair)
                assert sorted(pair[0][0]) == sorted((*_MODALITIES, "tabular"))
                for one, other in zip(*map(tf.nest.flatten, pair), strict=True):
                    count += 1
                    if one.dtype != other.dtype or not np.array_equal(one, other):
                        different.append([fold, number, count])
    return different, count


@pytest.mark.slow
def test_batches_are_the_same_bit_for_bit(data: str) -> None:
    # Batches of three folds, of four images, numbers and labels.
    assert _beside((compare_batches, data)) == [[[], 3 * (2 + 1) * 6]]


def train(name: str, data: str) -> Any:
    """Replicas, accuracy and losses of one fold, with half the images; and what memoize said."""
    script, said = _script(name), list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fastpipe.memoize").addHandler(handler)
    logging.getLogger("fastpipe.memoize").setLevel(logging.INFO)
    script.BATCH, script.MODALITIES = _BATCH, ("depth_rgb", "thermal_map")
    accuracy, losses = script.train(script.read_table(data), data, 0, 1, plain=True)
    return script.replicas().num_replicas_in_sync, accuracy, losses, said


@pytest.mark.slow
def test_losses_are_the_same(data: str) -> None:
    before, after = _beside((train, "before", data), (train, "after", data))
    assert before[0] == after[0] == 2
    assert len(before[2]) == len(set(before[2])) == 3 * 2  # three stages of two steps
    assert after[2] == pytest.approx(before[2], rel=1e-3)
    assert after[1] == before[1] and before[3] == []
    assert [message.split(": ", 1)[1] for message in after[3]] == ["computed: no entry yet"] * 2
    [again] = _beside((train, "after", data))
    assert [message.split(": ", 1)[1].split()[0] for message in again[3]] == ["loaded"] * 2
    assert again[2][:2] == after[2][:2], "those of pre-training are loaded"
    assert again[2] == pytest.approx(after[2], rel=1e-3) and again[1] == after[1]


def decode_in_stages(data: str) -> Any:
    """Seconds spent decoding, of one dataset after another."""
    _, after = _scripts()
    table, seconds = _table(after, data), []
    for names in (_MODALITIES, _MODALITIES[:1], _MODALITIES):
        made = after.dataset(table, data, names)
        assert sum(len(labels) for _, labels in made) == _ROWS
        seconds.append(made.stage_seconds.get("decode", 0.0))
    return seconds


@pytest.mark.slow
def test_each_image_is_decoded_once(data: str) -> None:
    [(first, *others)] = _beside((decode_in_stages, data))
    assert first > 0 and others == [0, 0]


def change(data: str) -> Any:
    """Mean, least and greatest value of images, and how their means differ: unchanged, and by each script."""
    import keras
    import pandas as pd
    import tensorflow as tf

    tf.random.set_seed(0)
    before, after = _scripts()
    table, name = pd.concat([_table(before, data)] * 6, ignore_index=True), _MODALITIES[-1]
    image, found = keras.Input((after.SIDE, after.SIDE, 3)), []
    augment = keras.Model(image, after.augmented(image))
    for script, seed in ((after, None), (before, 1), (after, 1)):
        batches = [inputs[name] for inputs, _ in script.dataset(table, data, (name,), seed)]
        assert {len(batch) for batch in batches} == {_BATCH}
        if script is after and seed is not None:
            batches = [augment(batch, training=True) for batch in batches]
        images = np.concatenate(batches)
        values = (images.mean(), images.min(), images.max(), images.mean((1, 2, 3)).std())
        found.append(list(map(float, values)))
    return found


@pytest.mark.slow
def test_both_change_images_as_much(data: str) -> None:
    [(plain, before, after)] = _beside((change, data))
    for mean, least, greatest, _ in (before, after):
        assert least >= 0 and greatest <= 255.001
        assert 0.1 < abs(mean - plain[0]) < 15  # corners are turned away from
    assert before[0] == pytest.approx(after[0], abs=5)
    assert before[3] == pytest.approx(after[3], rel=0.25)


def test_boxes_are_a_part_of_their_images(photos: Path, tmp_path: Path) -> None:
    import pandas as pd

    make_data = _script("make_data")
    make_data.main(str(tmp_path), 3, str(photos))
    table = pd.read_csv(tmp_path / "table.csv")
    assert len(table) == 3 and table["phase"].nunique() == 3
    for name in _MODALITIES:
        camera = name.split("_")[0]
        boxes = table[[f"{camera}_{edge}" for edge in make_data.EDGES]].to_numpy()
        for file, (left, top, right, bottom) in zip(table[name], boxes, strict=True):
            with Image.open(tmp_path / name / file) as image:
                width, height = image.size
            assert image.size == make_data.CAMERAS[camera]
            assert 0 <= left < right <= width and 0 <= top < bottom <= height
            assert 0.29 < (right - left) * (bottom - top) / (width * height) <= 0.6


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](*sys.argv[2:])))
