"""The case ``gpu``: its time, its check, its rows, and the whole command on the processor with little data."""

from __future__ import annotations

import dataclasses
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from clock import ManualClock
from rich.console import Console

from benchmarks.gpu import check
from benchmarks.gpu.case import Budget, merged, with_references
from benchmarks.gpu.check import Guarded, PixelCheck, apart, check_pixels, guarded
from benchmarks.gpu.sections import (
    PATCHED,
    SECTIONS,
    DeviceLoaderRow,
    PatchFeed,
    Run,
    augment_rows,
    decoding_peers,
    loader_specs,
    patch_model,
    why_missing,
)
from benchmarks.gpu.training import (
    FULL,
    TINY,
    DeviceUse,
    SameBatch,
    TrainRow,
    described,
    figures_of,
    fitting_batch,
    image_model,
)
from benchmarks.lines import markdown, training_lines
from benchmarks.peers import rows as bench_peers
from benchmarks.peers.children import torch_decode
from benchmarks.peers.children.protocol import Job, PeerError
from benchmarks.run import main
from fastpipe.bench import images as loaders
from fastpipe.bench.data import Photos, scan
from fastpipe.bench.images import LoaderSpec
from fastpipe.bench.plot import draw
from fastpipe.bench.report import machine_line, print_result
from fastpipe.bench.results import RowInfo, load
from fastpipe.bench.runner import ContenderError, Plan, Sample, Session
from fastpipe.bench.volume import made_scroll
from fastpipe.core.native import native
from fastpipe.core.transfer import Transfer
from fastpipe.images import gpu_batches as decoders

pytest.importorskip("tensorstore", reason="needs tensorstore: pip install 'fastpipe[volume]'")


@pytest.fixture(scope="module")
def photos(tree: Path) -> Photos:
    return scan(tree, "six small ones")


def spec_of(key: str, device: str = "cpu") -> LoaderSpec:
    section = key.split("-")[0]
    return next(spec for spec in loader_specs(section, device, 2, "uint8") if spec.key == key)


def at(*rates: float) -> list[Sample]:
    return [Sample(number, 100, 100 / rate) for number, rate in enumerate(rates)]


# ---- time --------------------------------------------------------------------------------------


def test_windows_are_as_long_as_there_is_time_for_and_no_longer() -> None:
    clock = ManualClock()
    budget = Budget(420, FULL, clock)
    share = budget.share(0.5)
    share.divide(6)
    assert share.window == 2.5 and share.plan() == Plan(7, 210, 2.5, 0.2, least=1)
    clock.now += 130
    share.divide(6)
    assert share.window == pytest.approx(80 / 6 / 8)
    assert share.plan().budget_s == 80 and share.plan().seconds == share.window
    clock.now += 300
    assert budget.left() == -10
    budget.begin()
    assert budget.left() == 420


def test_what_is_late_begins_nothing_and_leaves_less_to_the_next() -> None:
    clock = ManualClock()
    budget = Budget(100, TINY, clock)
    share = budget.share(0.4)
    clock.now += 27
    assert share.may_start()
    clock.now += 2
    assert not share.may_start()
    clock.now += 51
    assert share.plan().budget_s == 0 and budget.left() == 20
    assert budget.share(0.5).plan().budget_s == 10
    clock.now += 30
    assert budget.left() == -10 and budget.share(1).plan().budget_s == 0


# ---- the device --------------------------------------------------------------------------------


def test_busy_is_the_part_between_the_events_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = clock.now

        def elapsed_time(self, later: Event) -> float:
            return 1000 * (later.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    use = DeviceUse("cuda")
    use.mark()  # of a step before the window
    use.begin()
    for waits, computes in ((1.0, 3.0), (0.5, 0.5)):
        clock.now += waits
        use.mark()
        clock.now += computes
        use.mark()
    assert use.share() == pytest.approx(3.5 / 5)
    use.begin()
    assert use.share() is None


def test_the_processor_has_no_events_and_is_no_gpu() -> None:
    use = DeviceUse("cpu")
    use.begin()
    for _ in range(4):
        use.mark()
    assert use.share() is None and described("cpu") is None


@pytest.mark.parametrize(
    ("version", "words"), [("13.2", "torch finds no CUDA device"), (None, "this torch is built without CUDA")]
)
def test_without_a_gpu_the_command_says_what_to_do(
    version: str | None, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", version)
    assert main(["gpu"]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert words in error and "run it on a machine with one, or with --device cpu" in error
    assert not list(tmp_path.iterdir())


# ---- rows --------------------------------------------------------------------------------------


def test_an_error_of_a_row_is_a_reason_to_leave() -> None:
    class Breaks:
        key, chunk, workers = "breaks", 4, 1

        def measure(self, count: int) -> float:
            raise OSError("no room\nfor a batch")

        def close(self) -> None:
            raise AssertionError("closed")

    row = Guarded(Breaks())
    assert (row.key, row.chunk, row.workers) == ("breaks", 4, 1)
    with pytest.raises(ContenderError, match=r"^OSError: no room$"):
        row.measure(4)
    with pytest.raises(AssertionError, match="closed"):
        row.close()

    def leaves() -> None:
        raise ContenderError("as it is")

    with pytest.raises(ContenderError, match=r"^as it is$"):
        guarded(leaves)()


def test_loaders_on_a_gpu_are_those_of_both_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    specs = loader_specs("train", "cuda", 4, "float32")
    kinds = ["replaced", "cpu", "nvimgcodec", "dali", "share"]
    assert [spec.key for spec in specs] == [f"train-{kind}" for kind in kinds]
    assert [spec.num_workers for spec in specs] == [4, 0, 0, 0, 0]
    assert [spec.decode.gpu_share for spec in specs] == [None, None, None, None, "auto"]
    assert {spec.device for spec in specs} == {"cuda"} and not why_missing(specs[0])
    monkeypatch.setattr(loaders, "find_spec", lambda name: None)
    assert why_missing(specs[2]) == "nvImageCodec is not installed; pip install 'fastpipe[image]'"
    assert why_missing(specs[3]) == "DALI is not installed; pip install 'fastpipe[dali]'"
    assert why_missing(spec_of("decode-dali")) == "decodes on a GPU, and this is the processor"


def test_what_is_measured_on_a_gpu_is_known_without_one(
    photos: Photos, monkeypatch: pytest.MonkeyPatch
) -> None:
    problems = {"dali": "not checked: pixels are 3 of 255 apart on average, at most 0.5 asked"}
    run = Run("cuda", FULL, photos, 4, 256, problems)
    monkeypatch.setattr(loaders, "find_spec", lambda name: name)
    found = {one.info.key: one for one in SECTIONS[0].candidates(run)}
    assert list(found)[:4] == ["decode-replaced", "decode-cpu", "decode-nvimgcodec", "decode-dali"]
    assert found["decode-nvimgcodec"].make is not None
    assert found["decode-dali"].make is None and found["decode-dali"].why == problems["dali"]
    assert SECTIONS[0].label(run) == "decoded to 224×224, batches of 256, uint8 on the GPU"
    for peer in decoding_peers("cuda"):
        assert peer.is_on_gpu and peer.options["device"] == "cuda" and peer.output == "uint8"
        assert peer.key in found
    assert bench_peers._environment(decoding_peers("cpu")[0], "")["CUDA_VISIBLE_DEVICES"] == ""
    for key in ("augment-images", "augment-volumes"):
        rows = augment_rows(key, run.augmented, "cuda")
        assert [info.group for info, _ in rows] == ["replaced", "fastpipe"]
    patches = SECTIONS[-1]
    monkeypatch.setattr("benchmarks.gpu.sections.patch_model", lambda device: None)
    groups = [one.info.group for one in patches.candidates(run)]
    assert groups == ["replaced", "fastpipe", "floor"]


def test_a_loader_on_the_device_gives_what_is_asked_for(photos: Photos) -> None:
    row = DeviceLoaderRow(dataclasses.replace(spec_of("decode-replaced"), num_workers=0), photos, 2, 32)
    batches = list(row.batches(6))
    assert [tuple(images.shape) for images, _ in batches] == [(2, 3, 32, 32)] * 3
    assert all(images.dtype == torch.uint8 and labels.dtype == torch.int64 for images, labels in batches)
    assert row.measure(4) > 0
    row.close()


def test_training_begins_after_a_few_steps_and_counts_the_others() -> None:
    steps: list[int] = []

    class Feed:
        workers, asked, closed = 3, 0, False

        def batches(self, count: int) -> Iterator[Any]:
            self.asked = count
            for _ in range(count // 4):
                yield torch.zeros(4, 1), torch.zeros(4)

        def close(self) -> None:
            self.closed = True

    feed = Feed()
    row = TrainRow("train-x", feed, lambda inputs, labels: steps.append(len(inputs)), 4, "cpu")
    assert (row.chunk, row.workers) == (12, 3)
    assert row.measure(24) > 0
    assert feed.asked == 36 and len(steps) == 9 and row.busy == [None]
    with pytest.raises(RuntimeError, match="train-x gave 8 samples of 9"):
        row.measure(9)
    row.close()
    assert feed.closed


def test_a_batch_that_is_always_there() -> None:
    batch = [torch.zeros(4, 1), torch.zeros(4)]
    feed = SameBatch(batch)
    assert [one is batch for one in feed.batches(12)] == [True] * 3
    feed.close()
    with pytest.raises(IndexError):
        list(feed.batches(4))


def test_batches_are_halved_until_there_is_room() -> None:
    asked: list[int] = []

    def step(inputs: Any, labels: Any) -> None:
        asked.append(len(inputs))
        if len(inputs) > 16:
            raise torch.OutOfMemoryError("CUDA out of memory")

    def batch_of(size: int) -> list[Any]:
        return [torch.zeros(size, 1), torch.zeros(size)]

    assert fitting_batch(step, batch_of, 64) == 16 and asked == [64, 32, 16, 16]
    assert fitting_batch(step, batch_of, 3) == 3

    def fails(inputs: Any, labels: Any) -> None:
        raise RuntimeError(words)

    words = "CUDNN_STATUS_ALLOC_FAILED"
    with pytest.raises(RuntimeError, match="ALLOC_FAILED"):
        fitting_batch(fails, batch_of, 64)  # also with the least
    words = "an illegal instruction"
    with pytest.raises(RuntimeError, match="illegal"):
        fitting_batch(fails, batch_of, 64)


def test_models_learn_on_what_their_rows_give(tmp_path: Path) -> None:
    for sizes in (TINY, FULL):
        step = image_model(sizes, "cpu")
        weights = next(iter(step._model.parameters()))
        before = weights.detach().clone()
        step(torch.randn(2, 3, 32, 32), torch.tensor([1, 2]))
        assert not torch.equal(before, weights)
    assert sum(parameter.numel() for parameter in step._model.parameters()) == 25_557_032  # ResNet-50's
    scroll = made_scroll(TINY.scroll, tmp_path)
    for patched in PATCHED.values():
        feed = PatchFeed(scroll, 2, patched.chain(), None)
        batches = list(feed.batches(6))
        assert [tuple(values.shape) for values, _ in batches] == [(2, *TINY.scroll.patch)] * 3
        assert all(float(values.abs().max()) < 10 for values, _ in batches)
        patch_model("cpu")(*batches[0])
        feed.close()


# ---- the check ---------------------------------------------------------------------------------


def test_the_processors_pixels_are_pillows(photos: Photos) -> None:
    found = check_pixels([spec_of("decode-cpu")], photos, 4, 3)
    assert found.ok and found.photos == 4
    assert found.apart["decode-cpu"] == {
        "label": "FastImageFolder + FastLoader", "mean": 0.0, "largest": 0.0,
    }  # fmt: skip
    assert "0 of 255 on average, 0 at most; labels are the same" in found.sentence()


def test_what_crashes_is_a_problem_of_its_own() -> None:
    assert apart(len, "four") == 4
    with pytest.raises(ContenderError, match="the process in which it was tried has crashed"):
        apart(os.abort)
    with pytest.raises(TypeError, match="has no len"):
        apart(len, 4)


def test_a_gpus_decoder_is_tried_in_a_process_of_its_own(
    photos: Photos, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []

    def crashes(function: Any, spec: Any, *_: Any) -> Any:
        tried.append(spec.key)
        raise ContenderError("crashed")

    monkeypatch.setattr(check, "apart", crashes)
    specs = [spec_of("decode-cpu"), spec_of("decode-nvimgcodec", "cuda"), spec_of("decode-dali", "cuda")]
    found = check_pixels(specs, photos, 2, 2)
    assert tried == ["decode-nvimgcodec", "decode-dali"] and list(found.problems) == tried


def test_what_is_not_decoded_on_the_gpu_is_not_taken_for_it(photos: Photos) -> None:
    found = check_pixels([spec_of("decode-nvimgcodec")], photos, 2, 2)
    assert found.problems == {"decode-nvimgcodec": "images are not decoded on the GPU"}
    assert not found.as_json()["ok"] and "decoders differ from Pillow's" in found.sentence()


def test_what_a_device_decodes_is_compared(photos: Photos, monkeypatch: pytest.MonkeyPatch) -> None:
    class There:
        """Decodes on the device, which is the processor, a level too bright."""

        def __init__(self, apart: int) -> None:
            self.apart = apart

        def decode(self, parts: Any, stream: Any) -> list[Any]:
            return [
                torch.from_numpy(native.decode(blob, *box)).clamp_max(254) + self.apart for blob, box in parts
            ]

        def describe(self) -> str:
            return "a device's decoder"

    monkeypatch.setattr(Transfer, "is_elsewhere", True)
    for levels, is_enough in ((0, True), (1, False)):
        monkeypatch.setattr(decoders, "device_decoder", lambda *_, levels=levels: There(levels))
        found = check_pixels([spec_of("decode-nvimgcodec")], photos, 4, 4)
        assert found.ok == is_enough, found.problems
        assert abs(found.apart["decode-nvimgcodec"]["mean"] - levels) < 0.1


def test_who_decodes_is_heard(photos: Photos) -> None:
    with check._heard() as said:
        check._LOG.info("images are decoded on %s: %s", "cuda", "a decoder")
        check._LOG.info("something else")
    check._LOG.info("images are decoded on %s: %s", "cuda", "nobody hears that")
    assert said == ["images are decoded on cuda: a decoder"]


@pytest.mark.parametrize(("key", "mean", "is_enough"), [
    ("decode-cpu", 0.0, True), ("decode-cpu", 0.01, False), ("decode-dali", 0.5, True),
    ("decode-dali", 0.6, False), ("decode-dali", float("nan"), False),
])  # fmt: skip
def test_a_gpus_pixels_may_differ_a_little(key: str, mean: float, is_enough: bool) -> None:
    found = PixelCheck(2)
    found.add(spec_of(key), [torch.full((2, 3, 4, 4), mean), torch.full((1, 3, 4, 4), mean)])
    assert found.ok == is_enough and set(found.problems) == (set() if is_enough else {key})


def test_other_labels_are_a_problem(photos: Photos, monkeypatch: pytest.MonkeyPatch) -> None:
    right = check._decoded

    def other(*arguments: Any) -> Any:
        return [(images, labels + 1) for images, labels in right(*arguments)]

    monkeypatch.setattr(check, "_decoded", other)
    found = check_pixels([spec_of("decode-cpu")], photos, 2, 2)
    assert found.problems == {"decode-cpu": "labels or order differ"}


def test_wrong_pixels_end_the_command_with_1(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    right = check._decoded

    def wrong(*arguments: Any) -> Any:
        return [(images ^ 1, labels) for images, labels in right(*arguments)]

    monkeypatch.setattr(check, "_decoded", wrong)
    files = ["--json", str(tmp_path / "never.json"), "--plot", str(tmp_path / "never.png")]
    assert main(["gpu", "--device", "cpu", "--data", str(tree), *files]) == 1
    captured = capsys.readouterr()
    assert "decode-cpu: pixels are 1 of 255 apart on average, at most 0 asked" in captured.err
    assert captured.out == "" and not list(tmp_path.iterdir())


# ---- peers -------------------------------------------------------------------------------------


def job_of(photos: Photos, library: str) -> Job:
    return Job(
        str(photos.folder), photos.indices, photos.files, photos.labels, 4, 1, 32, (), (), "uint8", "",
        {"library": library, "device": "cpu"},
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore:The image decoding and encoding capabilities")
def test_torchvision_decodes_batches(photos: Photos) -> None:
    made = torch_decode.stream(job_of(photos, "torchvision"))
    images, labels = next(made.batches)
    torch.set_grad_enabled(True)  # which a process of its own need not
    assert images.shape == (4, 3, 32, 32) and images.dtype == torch.uint8 and images.float().std() > 1
    assert set(labels.tolist()) <= {0, 1} and made.wait is None and made.ahead == 0


def test_torchcodec_is_asked_for_a_batch_or_says_which_version_has_that(
    photos: Photos, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def decode_jpeg(files: list[str], *, mode: str, device: str) -> list[Any]:
        asked.append((len(files), mode, device))
        return [torch.zeros(3, 40, 60, dtype=torch.uint8) for _ in files]

    module = ModuleType("torchcodec.decoders")
    monkeypatch.setitem(sys.modules, "torchcodec", ModuleType("torchcodec"))
    monkeypatch.setitem(sys.modules, "torchcodec.decoders", module)
    with pytest.raises(PeerError, match=r"pip install 'torchcodec>=0\.16'"):
        torch_decode.stream(job_of(photos, "torchcodec"))
    module.decode_jpeg = decode_jpeg  # type: ignore[attr-defined]
    images, _ = next(torch_decode.stream(job_of(photos, "torchcodec")).batches)
    torch.set_grad_enabled(True)
    assert images.shape == (4, 3, 32, 32) and asked == [(4, "RGB", "cpu")]


# ---- figures -----------------------------------------------------------------------------------


def test_what_a_step_loses_is_told_by_the_ceiling_of_its_round() -> None:
    samples = {"slow": at(50, 90), "ceiling": at(100, 100)}
    slow, ceiling, gone = (SimpleNamespace(key=key, busy=[]) for key in ("slow", "ceiling", "gone"))
    slow.busy, ceiling.busy = [0.9, 0.4, 0.8], [None, None]  # the first was warming up
    told = figures_of([slow, ceiling, gone], samples, "ceiling")  # type: ignore[list-item]
    assert told == [
        {
            "key": "slow",
            "stall": {"median": 0.3, "low": 0.1, "high": 0.5, "raw": [0.5, 0.1]},
            "busy": {"median": 0.6, "low": 0.4, "high": 0.8, "raw": [0.4, 0.8]},
        },
        {"key": "ceiling", "stall": None, "busy": None},
    ]
    assert figures_of([slow], {"slow": at(50)}, "ceiling")[0]["stall"] is None  # type: ignore[list-item]
    rows = [{"key": "slow", "label": "a loader"}, {"key": "ceiling", "label": "the ceiling"}]
    assert training_lines({"rows": rows, "training": {"train": told}}) == [
        "train: a loader: lost for want of data 30.0% (10.0% to 50.0%), GPU busy 60.0% (40.0% to 80.0%)"
    ]


def test_a_section_without_what_is_replaced_has_another_reference() -> None:
    def info(key: str, group: str, section: str, note: str = "") -> RowInfo:
        return RowInfo(key, key, group, None, "uint8", note, section=section, unit="images")

    infos = [
        info("a-replaced", "replaced", "a"), info("a-cpu", "fastpipe", "a"),
        info("b-replaced", "replaced", "b"), info("b-ceiling", "floor", "b"), info("b-cpu", "fastpipe", "b", "x"),
        info("c-ceiling", "floor", "c"),
    ]  # fmt: skip
    session = merged([
        Session({"a-replaced": at(1, 2, 3), "a-cpu": at(1, 2, 3)}, {}, 3),
        Session({"b-ceiling": at(1, 2), "b-cpu": at(1, 2), "c-ceiling": at(1)}, {"b-replaced": "broke"}, 2),
        Session(),
    ])  # fmt: skip
    assert session.rounds == 2 and session.failures == {"b-replaced": "broke"}
    found = {one.key: one for one in with_references(infos, session)}
    assert {key: one.group for key, one in found.items()} == {
        "a-replaced": "replaced", "a-cpu": "fastpipe", "b-ceiling": "floor", "b-cpu": "replaced",
    }  # fmt: skip
    assert found["b-cpu"].note == "x; compared with, as what is replaced was not measured"


# ---- the whole command -------------------------------------------------------------------------


def ran(folder: Path, *arguments: str, **environment: str) -> tuple[dict[str, Any], str]:
    """The command in a process of its own: what it wrote, and what it printed."""
    path = folder / "result.json"
    run = Path(__file__).resolve().parents[2] / "benchmarks" / "run.py"
    command = [sys.executable, str(run), "gpu", *arguments]
    command += ["--json", str(path), "--plot", str(folder / "result.png")]
    variables = {**os.environ, **environment}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=variables)
    assert done.returncode == 0, done.stderr
    assert (folder / "result.png").read_bytes().startswith(b"\x89PNG")
    return load(path), done.stdout


@pytest.fixture(scope="module")
def result(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("gpu")
    # One thread: several that wait for each other beside other tests take many times as long.
    made, printed = ran(
        folder, "--device", "cpu", "--data", str(tree), OMP_NUM_THREADS="1", XDG_CACHE_HOME=str(folder)
    )
    return {**made, "printed": printed, "text": (folder / "result.json").read_text()}


@pytest.mark.slow
@pytest.mark.hang_after(240)
def test_a_run_on_the_processor_has_all_sections(result: dict[str, Any], tree: Path) -> None:
    keys = [row["key"] for row in result["rows"]]
    assert list(result["sections"]) == [section.key for section in SECTIONS]
    assert set(result["best"]) == {row["section"] for row in result["rows"]} == set(result["sections"])
    assert {"decode-cpu", "decode-torchvision", "train-cpu", "train-ceiling"} <= set(keys)
    assert {"augment-images-replaced", "augment-volumes-replaced", "patches-nnunet-ceiling"} <= set(keys)
    assert result["main"] == "train-cpu" and result["machine"]["gpu"] is None
    for row in result["rows"]:
        assert row[f"{row['unit']}_per_s"]["median"] > 0 and len(row["samples"]) <= TINY.rounds
    missing = {miss["key"]: miss["why"] for miss in result["missing"]}
    for section in ("decode", "train"):
        assert missing[f"{section}-nvimgcodec"] == "decodes on a GPU, and this is the processor"
    assert result["check"]["ok"] and set(result["check"]["apart"]) == {"decode-cpu"}
    assert result["versions"]["torch"] == torch.__version__.split("+")[0]
    assert str(tree) not in result["text"] and str(Path.home()) not in result["text"]


@pytest.mark.slow
@pytest.mark.hang_after(240)
def test_what_steps_lose_is_told_and_busy_is_not_made_up(result: dict[str, Any]) -> None:
    assert set(result["training"]) == {"train", *PATCHED}
    for section, rows in result["training"].items():
        assert all(row["busy"] is None for row in rows)
        stalls = {row["key"]: row["stall"] for row in rows}
        assert stalls.pop(f"{section}-ceiling") is None
        assert stalls and all(
            stall["low"] <= stall["median"] <= stall["high"] < 1 for stall in stalls.values()
        )
    assert "lost for want of data" in result["printed"] and "GPU busy" not in result["printed"]


@pytest.mark.slow
@pytest.mark.leaks("matplotlib keeps its fonts open")
@pytest.mark.hang_after(240)
def test_a_result_of_a_gpu_is_printed_and_drawn(result: dict[str, Any], tmp_path: Path) -> None:
    made = {name: value for name, value in result.items() if name not in ("printed", "text")}
    made["machine"] = {**made["machine"], "gpu": {"name": "Some GPU", "driver": "600.1"}}
    assert ", Some GPU (driver 600.1), " in machine_line(made)
    text = markdown(made)
    assert text.count("| images/s, median") == 3 and text.count("| patches/s, median") == 2
    draw(made, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    output = io.StringIO()
    print_result(made, Console(file=output, width=160))
    assert "a batch that is always there" in output.getvalue()


def test_without_time_the_command_says_so(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(Budget, "left", lambda self: 0.0)
    arguments = ["--device", "cpu", "--data", str(tree), "--seconds", "3", "--json", str(tmp_path / "x.json")]
    monkeypatch.chdir(tmp_path)
    assert main(["gpu", *arguments]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "nothing could be measured: no time was left for it: give more than --seconds 3" in error


@pytest.mark.gpu
@pytest.mark.hang_after(600)
def test_a_run_on_a_gpu(tree: Path, tmp_path: Path) -> None:
    made, printed = ran(tmp_path, "--data", str(tree), "--batch-size", "16", "--seconds", "240")
    keys = {row["key"] for row in made["rows"]}
    expected = {
        "decode-cpu", "decode-nvimgcodec", "train-cpu", "train-nvimgcodec", "train-share", "train-ceiling",
        "augment-images-device", "augment-volumes-device", "patches-elastic-device", "patches-nnunet-device",
    }  # fmt: skip
    assert expected <= keys, made["missing"]
    assert made["machine"]["gpu"]["name"] and made["machine"]["gpu"]["driver"] != "unknown"
    for rows in made["training"].values():
        assert all(0 < share <= 1.01 for row in rows for share in row["busy"]["raw"])
    apart = made["check"]["apart"]
    assert apart["decode-cpu"]["mean"] == 0 and apart["decode-nvimgcodec"]["mean"] <= 0.5
    assert "GPU busy" in printed
