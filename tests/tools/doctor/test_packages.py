"""Whether packages go together: every combination that users meet."""

from __future__ import annotations

from typing import Any

import pytest

from fastpipe.tools.doctor import decoding as decoders
from fastpipe.tools.doctor import packages
from fastpipe.tools.doctor.child import Answer
from fastpipe.tools.doctor.packages import _distributions as distributions
from fastpipe.tools.doctor.packages import _torch as of_torch
from fastpipe.tools.doctor.report import Examined, Finding

CUDA = {
    "version": "2.15.0+cu132",
    "cuda": "13.2",
    "hip": None,
    "threads": 4,
    "gpus": [],
    "torchvision": "0.29.2",
}
CPU = {**CUDA, "version": "2.15.0+cpu", "cuda": None}


@pytest.fixture(autouse=True)
def _no_gpu_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def bad(found: Any) -> list[Finding]:
    return [one for one in found if one.state != "ok"]


def test_without_a_gpu_there_is_no_problem() -> None:
    for facts in (CUDA, CPU):
        found = list(of_torch(facts, "", gpus=0))
        assert not bad(found) and "no NVIDIA GPU is here" in found[-1].text


def test_a_gpu_that_torch_sees() -> None:
    found = list(of_torch({**CUDA, "gpus": ["NVIDIA H100"] * 2, "driver": 13020}, "", gpus=2))
    assert not bad(found) and "sees 2 GPUs: NVIDIA H100; the driver supports CUDA 13.2" in found[-1].text


@pytest.mark.parametrize(
    ("facts", "text", "remedy"),
    [
        ({**CPU, "driver": 12040}, "it is a build without CUDA", "cu12x"),
        (CUDA, "no driver that programs can use", "--gpus all"),
        ({**CUDA, "driver": 12040}, "built for CUDA 13.2, and the driver supports 12.4 at most", "12.x"),
        ({**CUDA, "driver": 13020, "why_no_gpus": "error 802"}, "error 802", "torch.zeros(1).cuda()"),
    ],
)
def test_a_gpu_that_torch_does_not_see(facts: dict[str, Any], text: str, remedy: str) -> None:
    (found,) = bad(of_torch(facts, "", gpus=1))
    assert found.state == "problem" and text in found.text and remedy in found.remedy


def test_a_gpu_that_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (found,) = bad(of_torch({**CUDA, "driver": 13020}, "", gpus=1))
    assert found.state == "warning" and "CUDA_VISIBLE_DEVICES='' hides them" in found.text


def test_torch_that_crashes() -> None:
    (found,) = of_torch({"driver": 13020}, "it crashed with SIGILL", gpus=0)
    assert found.state == "problem" and "SIGILL" in found.text
    assert not list(packages._torchvision({}, "it crashed with SIGILL", {}))


def test_torch_without_numpy() -> None:
    (found,) = bad(of_torch({**CUDA, "why_no_numpy": "RuntimeError: Numpy is not available"}, "", gpus=0))
    assert "numpy<2" in found.remedy


def test_torchvision_that_does_not_go_with_torch() -> None:
    facts = {**CPU, "why_no_torchvision": "RuntimeError: operator torchvision::nms does not exist"}
    del facts["torchvision"]
    (found,) = packages._torchvision(facts, "", {"torchvision": "0.29.2"})
    assert found.state == "problem" and "0.29.2 cannot be imported beside torch 2.15.0+cpu" in found.text
    assert found.remedy.endswith("--index-url https://download.pytorch.org/whl/cpu")
    (found,) = packages._torchvision({**facts, "cuda": "12.4"}, "", {"torchvision": "0.29.2"})
    assert found.remedy.endswith("whl/cu124")


def test_torchvision_that_crashes_or_is_missing() -> None:
    facts = {name: value for name, value in CUDA.items() if name != "torchvision"}
    (found,) = packages._torchvision(facts, "it crashed with SIGSEGV", {"torchvision": "0.29.2"})
    assert found.state == "problem" and "SIGSEGV" in found.text
    (found,) = packages._torchvision({**facts, "why_no_torchvision": "it is not installed"}, "", {})
    assert found.state == "warning" and "fastpipe[torch]" in found.remedy


def test_torchvision_of_another_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages.metadata, "requires", lambda _: ["numpy", "torch==2.14.1"])
    (found,) = packages._torchvision(CUDA, "", {"torchvision": "0.29.2"})
    assert found.state == "warning" and "was built for torch 2.14.1" in found.text
    monkeypatch.setattr(packages.metadata, "requires", lambda _: ["torch (==2.15.0)"])
    assert not bad(packages._torchvision(CUDA, "", {"torchvision": "0.29.2"}))


def test_tensorflow() -> None:
    installed = {"tensorflow-cpu": "2.21.0", "numpy": "2.4.6"}
    assert not bad(packages._tensorflow(Answer("2.21.0"), installed))
    (found,) = bad(packages._tensorflow(Answer(None, "ImportError: numpy.core"), installed))
    assert found.state == "problem" and "with NumPy 2.4.6: ImportError" in found.text
    (found,) = bad(packages._tensorflow(Answer("2.21.0"), {**installed, "tensorflow": "2.20.0"}))
    assert "both installed" in found.text and "pip uninstall tensorflow tensorflow-cpu" in found.remedy


@pytest.mark.parametrize(
    ("installed", "cuda", "gpus", "expected"),
    [
        ({"nvidia-dali-cuda130": "2.4", "nvidia-nvimgcodec-cu13": "0.9"}, "13.2", 1, []),
        ({"nvidia-dali-cuda120": "2.4"}, "13.2", 1, ["nvidia-dali-cuda130"]),
        ({"nvidia-nvimgcodec-cu12": "0.9"}, "13.2", 1, ["nvidia-nvimgcodec-cu13"]),
        ({"nvidia-nvimgcodec-cu12": "0.9"}, "13.2", 0, []),  # on the CPU it does not matter
        ({"nvidia-nvimgcodec-cu12": "0.9"}, "", 1, []),
        ({"nvidia-nvimgcodec-cu12": "1", "nvidia-nvimgcodec-cu13": "1"}, "", 0, ["install one of them"]),
    ],
)
def test_nvidias_packages(installed: dict[str, str], cuda: str, gpus: int, expected: list[str]) -> None:
    found = bad(distributions(installed, cuda, gpus, None))
    assert len(found) == len(expected)
    assert all(
        one.state == "warning" and text in one.remedy for one, text in zip(found, expected, strict=True)
    )


def test_dali_that_cannot_be_imported() -> None:
    found = list(distributions({}, "", 0, Answer(None, "it crashed with SIGILL")))
    assert [one.state for one in found] == ["problem"]


# ---- decoders -----------------------------------------------------------------------------------


def measured(monkeypatch: pytest.MonkeyPatch, answer: Answer) -> tuple[list[Finding], Examined]:
    monkeypatch.setattr(decoders, "ask", lambda *_, **__: answer)
    examined = Examined()
    return list(decoders.check(examined)), examined


def test_decoders_that_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = measured(monkeypatch, Answer(None, "it crashed with SIGILL"))
    assert [one.state for one in found] == ["problem"] and "SIGILL" in found[0].text


def test_a_decoder_that_is_missing_and_one_that_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {
        "dali": {"why": "MissingDependencyError: not installed"},
        "libjpeg-turbo": {"what": "libjpeg-turbo, the whole image", "rate": 500.0},
        "pillow": {"what": "Pillow-SIMD 9.5.0.post2, the whole image", "rate": 900.0},
    }
    value = {
        "of": "photographs",
        "decoders": rates,
        "chosen": "libjpeg-turbo",
        "used": "JPEG → libjpeg-turbo",
    }
    found, examined = measured(monkeypatch, Answer(value))
    assert [one.text for one in bad(found)] == [
        "dali cannot be used: not installed",
        "pillow decodes 1.8 times as many of these images a second",
    ]
    assert examined.images_s == 500.0
    assert any("Pillow-SIMD 9.5.0.post2" in one.text for one in found)
