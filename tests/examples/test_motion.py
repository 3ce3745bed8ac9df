"""The example ``motion_generation``: both scripts have the same scenes, and differ by the swap alone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fastpipe
from fastpipe import augment, generation
from fastpipe.generation.rows import row_generators

_FEW = 40  # frames, where 250 of them show no more


EXAMPLE = "motion_generation"


@pytest.fixture
def short(scripts: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The scripts, whose scenes end soon."""
    for name in ("actor", "before", "after"):
        monkeypatch.setattr(scripts[name], "FRAMES", _FEW)
    return scripts  # type: ignore[no-any-return]


def test_all_frames_at_once_are_those_of_one_after_the_other(scripts: Any) -> None:
    actor = scripts["actor"]
    count = len(actor.THEMES)
    scenes = actor.generate_random_scene(row_generators(5, range(count)))
    scenes.theme = np.arange(count)  # all of them
    found = actor.get_poses(scenes)
    assert found.shape == (count, 250, 25, 3) and found.dtype == np.float32
    for row in range(count):
        player = actor.Actor(actor.Scene(**{name: value[row] for name, value in vars(scenes).items()}))
        poses = np.array([player.get_pose(frame * 0.04) for frame in range(250)], np.float32)
        assert np.isfinite(poses).all() and np.ptp(poses, axis=0).max() > 0.01  # it moves
        assert np.array_equal(found[row], poses)  # as the operations are the same


@settings(max_examples=15)
@given(seed=st.integers(0, 2**64), indices=st.lists(st.integers(0, 2**40), min_size=1, max_size=12))
def test_a_batch_has_the_rows_that_are_made_one_by_one(scripts: Any, seed: int, indices: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("actor", "before", "after"):
            patch.setattr(scripts[name], "FRAMES", 8)
        found = scripts["after"].sample.batch(np.array(indices), row_generators(seed, indices))
        for script in (scripts["before"], scripts["after"]):
            for row, index in enumerate(indices):
                alone = script.sample(index, np.random.default_rng([seed, index]))
                assert np.array_equal(found["motion"][row], alone["motion"])
                assert found["theme"][row] == alone["theme"]
    assert found["motion"].dtype == np.float32 and found["motion"].shape == (len(indices), 8, 25, 3)


def test_both_scripts_have_the_same_scenes(short: Any, tmp_path: Path) -> None:
    short["before"].generate_dataset(tmp_path / "before.npz", 6, 3, augment=True)
    made = fastpipe.generate(short["after"].sample, 6, tmp_path / "after.h5", seed=3, progress=False)
    assert made.rows == 6
    with np.load(tmp_path / "before.npz") as before, h5py.File(made.paths[0]) as after:
        assert len(before["motion"]) == 30
        assert np.array_equal(before["motion"][::5], after["motion"][:])
        assert np.array_equal(before["theme"][::5], after["theme"][:])
        assert np.array_equal(before["theme"], np.repeat(after["theme"][:], 5))


class _Told:
    """A generator that is told the numbers between 0 and 1."""

    def __init__(self, u: np.ndarray) -> None:
        self.u = u

    def uniform(self, low: float, high: float, size: int | None = None) -> Any:
        return low + (high - low) * (self.u if size else self.u[0])


@pytest.mark.parametrize(("number", "kind"), [*enumerate(("speed", "position", "scale", "mirror"))])
def test_both_vary_motion_in_the_same_ways(scripts: Any, number: int, kind: str) -> None:
    """Given the same numbers; each draws its own."""
    before, op = scripts["before"], scripts["after"].AUGMENTATIONS.ops[number]
    assert before.AUGMENTATIONS[number] == kind
    rng = np.random.default_rng(0)
    motions = rng.normal(size=(6, 250, 25, 3)).astype(np.float32)
    u = rng.random((6, op.draws))
    # Stored variations are all mirrored; half of those that are drawn anew are.
    table = np.ones((6, 1)) if kind == "mirror" else op.table(u, motions.shape)
    found = op.apply(torch.from_numpy(motions), augment.Parameters.of_table(op.names, table)).numpy()
    for motion, row, result, speed in zip(motions, u, found, table[:, 0], strict=True):
        varied = before.augment_motion_sequence(motion, kind, _Told(row))
        assert varied.dtype == np.float32 and not np.array_equal(varied, motion)
        # Faster ones end sooner.  What stays then is the last frame in before.py, else the last one played.
        frames = min(250, int(249 / speed) + 1) if kind == "speed" else 250
        assert np.allclose(result[:frames], varied[:frames], atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["before", "after"])
def test_it_learns(
    short: Any, name: str, tmp_path: Path, same_generators: None, capsys: pytest.CaptureFixture[str]
) -> None:
    losses, accuracy = short[name].main(str(tmp_path / "new"), 24, 3)
    assert len(losses) == 3 and all(map(math.isfinite, losses)) and losses[-1] < losses[0]
    assert 0 <= accuracy <= 1
    printed = capsys.readouterr().out
    assert "generated 24 scenes in" in printed and printed.count("samples/s") == 3 and "accuracy" in printed
    if name == "after":
        again, _ = short[name].main(str(tmp_path / "new"), 24, 1)  # with the scenes that are there
        assert again[0] == pytest.approx(losses[0], abs=1e-5)


def test_a_look_names_get_pose(short: Any, tmp_path: Path) -> None:
    look = generation.probe(short["before"].sample, 4, tmp_path / "m.h5", workers=1, executor="threads")
    assert any(one.where.startswith("get_pose ") and one.calls == _FEW for one in look.top)
    assert look.row_nbytes == _FEW * 25 * 3 * 4 + 8


@pytest.mark.slow
def test_both_run_as_scripts(scripts: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = scripts["compare"].main(str(tmp_path), 4, 1, 1)
    assert not list(tmp_path.iterdir())
    (_, before_size, _), (_, after_size, _) = found["before.py"][0], found["after.py"][0]
    assert before_size > 5 * 4 * 75_000 and 4 * 75_000 <= after_size < before_size / 4
    printed = capfd.readouterr().out
    assert "before.py: 4 scenes generated in" in printed and "the swap: 47 lines go, 34 lines come" in printed
