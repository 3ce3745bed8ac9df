"""The example ``volume_patches``: both scripts learn, label alike, and differ by the swap alone."""

from __future__ import annotations

import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scripts import started

from fastpipe import augment
from fastpipe.core.types import Key

_TEST = (48, 96, 100)  # along the last dimension, patches at their stride do not come to the end


EXAMPLE = "volume_patches"
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def data(scripts: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("volumes")
    scripts["make_data"].main(str(folder), shape=[side * 3 // 2 for side in _TEST])
    return str(folder)


@pytest.mark.slow
def test_both_train_and_label(
    scripts: Any, data: str, same_generators: None, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("before", "after"):
        losses, path = scripts[name].main(data, 6)
        assert len(losses) == 6 and losses[-1] < losses[0]
        prediction = np.load(path)
        assert prediction.shape == (3, *_TEST) and prediction.dtype == np.float32
        np.testing.assert_allclose(prediction.sum(axis=0), 1, atol=1e-5)
        printed = capsys.readouterr().out
        assert printed.count("loss") == 6 and "s a step, " in printed
        assert f"prediction_{name}.npy" in printed


def test_with_the_same_weights_predictions_are_equal(
    scripts: Any, data: str, same_generators: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert scripts["compare"].main(data, 2)
    printed = capsys.readouterr().out
    assert "\nequal predictions" in printed and "the swap: 61 lines go, 19 lines come" in printed


def test_both_bend_a_patch_alike(
    scripts: Any, data: str, same_generators: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, after = scripts["before"], scripts["after"]
    box = tuple(slice(8, 8 + side) for side in before.PATCH)
    parts = [before.opened(f"{data}/train.zarr/{name}")[box].read().result() for name in ("image", "labels")]
    bend = augment.RandomElastic3D(after.POINTS, after.BEND, fill="edge")
    key = Key(3, 0, np.arange(1))
    parameters = bend.draw((1, 1, *before.PATCH), key=key)
    moves = bend.moves_of_points(int(parameters["bend"][0])) / after.BEND
    monkeypatch.setattr(torch, "randn", lambda *shape: torch.from_numpy(moves).reshape(shape))
    image, labels = before.elastic(*parts)
    images, all_labels = bend(*(torch.from_numpy(part)[None] for part in parts), key=key)
    assert images.dtype == torch.float32 and all_labels.dtype == torch.uint8
    assert abs(image - parts[0]).max() > 1000
    np.testing.assert_allclose(images[0].numpy(), image, atol=20)  # of 65,535: places are float32
    # Halfway between two voxels, either is the nearest.
    assert (all_labels[0].numpy() == labels).mean() > 0.9999


def test_the_data_can_be_made_of_nifti_files(
    scripts: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import nibabel

    rng, shape = np.random.default_rng(0), (96, 64, 70)
    image, grey = (rng.integers(0, 256, shape).astype(np.uint8) for _ in range(2))
    white = (rng.random(shape) * (255 - grey)).astype(np.uint8)
    grey[0, 0, 0], white[0, 0, 1], grey[0, 0, 1] = 255, 255, 0
    for name, array in (("t1", image), ("grey_matter", grey), ("white_matter", white)):
        nibabel.save(nibabel.Nifti1Image(array, np.eye(4)), tmp_path / f"{name}.nii.gz")
    scripts["make_data"].main(str(tmp_path / "made"), str(tmp_path))
    assert "train.zarr/labels: 64×64×70 uint8" in capsys.readouterr().out
    opened = scripts["before"].opened
    made, labels, test = (
        opened(f"{tmp_path}/made/{name}").read().result()
        for name in ("train.zarr/image", "train.zarr/labels", "test.zarr/image")
    )
    assert made.dtype == np.uint16 and labels.dtype == np.uint8
    assert np.array_equal(np.concatenate([made, test]), image.astype(np.uint16) * 257)
    other = 255 - grey.astype(int) - white
    assert np.array_equal(labels, np.argmax([other, grey, white], axis=0)[:64])
    assert len(scripts["after"].main(str(tmp_path / "made"), 1)[0]) == 1


@pytest.mark.slow
def test_from_a_server_patches_are_the_same(
    scripts: Any, data: str, same_generators: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where predictions go
    torch.manual_seed(0)
    model = scripts["before"].UNet()
    with _serving(scripts, data, delay_ms=1) as server:
        for name in ("before", "after"):
            of_folder, of_url = (np.load(scripts[name].predict(model, place)) for place in (data, server.url))
            assert np.array_equal(of_folder, of_url)
            assert (tmp_path / f"prediction_{name}.npy").exists()
        assert len(scripts["after"].main(server.url, 2)[0]) == 2
        assert len(scripts["before"].train(model, server.url, 1)) == 1


def test_the_server_waits_before_each_reply_and_is_closed(
    scripts: Any, data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(scripts["serve"], "sleep", waits.append)
    with _serving(scripts, data, delay_ms=7) as server:
        for _ in range(3):
            with urllib.request.urlopen(f"{server.url}/train.zarr/image/zarr.json") as reply:
                assert reply.read() == Path(data, "train.zarr/image/zarr.json").read_bytes()
        with pytest.raises(urllib.error.HTTPError, match="404") as error:
            urllib.request.urlopen(f"{server.url}/train.zarr/image/c/9/9/9")
        error.value.close()
    assert waits == [0.007] * 4
    with pytest.raises(urllib.error.URLError, match="refused"):
        urllib.request.urlopen(server.url)


def test_the_server_ends_with_ctrl_c(data: str) -> None:
    script = Path(__file__).resolve().parents[2] / "examples" / "volume_patches" / "serve.py"
    with started(script, data, "--delay-ms", "0") as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        with urllib.request.urlopen(f"{url}/test.zarr/image/zarr.json") as reply:
            assert b"uint16" in reply.read()
        process.send_signal(signal.SIGINT)
        assert process.stdout.read() == "closed\n"
    assert process.returncode == 0


@contextmanager
def _serving(scripts: Any, folder: str, delay_ms: float) -> Iterator[Any]:
    """A server in this process, until the end of the block."""
    with scripts["serve"].SlowServer(folder, delay_ms) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
