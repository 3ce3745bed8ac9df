"""``fastpipe doctor``: what it finds on machines and with packages as users have them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fastpipe.core.machine import ControlGroups
from fastpipe.tools.doctor import decoding, machine, packages
from fastpipe.tools.doctor.child import Answer
from fastpipe.tools.doctor.report import Examined

MIB, GIB = 1 << 20, 1 << 30
BUILT = {
    "version": "2.15.0+cu132", "cuda": "13.2", "hip": None, "threads": 4, "gpus": [], "torchvision": "0.29.2",
}  # fmt: skip
CPU = {**BUILT, "version": "2.15.0+cpu", "cuda": None}
WITHOUT = {name: value for name, value in BUILT.items() if name != "torchvision"}
WHY = "RuntimeError: operator torchvision::nms does not exist"
NMS = {**WITHOUT, "version": "2.15.0+cpu", "why_no_torchvision": WHY}
VISION = {"torchvision": "0.29.2"}
TF = {"tensorflow-cpu": "2.21.0", "numpy": "2.4.6"}
DALI, CU12, CU13 = "nvidia-dali-cuda120", "nvidia-nvimgcodec-cu12", "nvidia-nvimgcodec-cu13"
ROOM = "(36.8 MiB) × prefetch_factor 2 × 4 workers of torch's DataLoader need 294 MiB"
OFTEN = {"nr_periods": 1000, "nr_throttled": 500}
SIGILL = "it crashed with SIGILL"


def space(free: int) -> Any:
    return machine._shared_memory(SimpleNamespace(f_frsize=1, f_blocks=GIB, f_bavail=free), workers=4)


FINDINGS: dict[str, tuple[Any, tuple[Any, ...], str, str, str]] = {
    "all cores": (machine._count, (64, 64, None), "ok", "", ""),
    "few cores": (machine._count, (64, 8, None), "warning", "", ""),
    "quota": (machine._count, (64, 64, 2.5), "warning", "cores to use: 2.5;", "but use 2"),
    "no periods": (machine._throttling, ({},), "ok", "", ""),
    "seldom throttled": (machine._throttling, ({**OFTEN, "nr_throttled": 5},), "ok", "", ""),
    "throttled": (machine._throttling, ({**OFTEN, "throttled_usec": 7_000_000},), "warning", "7 s", ""),
    "throttled, old kernel": (machine._throttling, ({**OFTEN, "throttled_time": 7 * 10**9},),
                              "warning", "7 s", ""),
    "much shared memory": (space, (GIB,), "ok", ROOM, ""),
    "half the shared memory": (space, (147 * MIB,), "warning", ROOM, "--shm-size"),
    "little shared memory": (space, (64 * MIB,), "warning", ROOM, "--ipc=host"),
    "no batch in shared memory": (space, (20 * MIB,), "problem", ROOM, "--ipc=host"),
    "no shared memory needed": (machine._shared_memory, (None, 4), "ok", "", ""),
    "few files": (machine._open_files, (256, 4096, 2), "warning", "", ""),
    "many files": (machine._open_files, (1024, 4096, 2), "ok", "", ""),
    "hard limit": (machine._open_files, (1024, 1024, 128), "warning", "make 1,280", "higher hard limit"),
    "unlimited files": (machine._open_files, (-1, -1, 10_000), "ok", "", ""),
    "unlimited processes": (machine._processes, (None, 64), "ok", "", ""),
    "few processes": (machine._processes, (100, 8), "warning", "", ""),
    "many processes": (machine._processes, (1000, 8), "ok", "", ""),
    "threads not set": (machine._thread_settings, ({}, 8, 8), "ok", "", ""),
    "more than a rank's": (machine._thread_settings, ({}, 2, 64), "warning", "libraries take 64 threads", ""),
    "threads set": (machine._thread_settings, ({"OMP_NUM_THREADS": "4"}, 8, 8), "ok", "", ""),
    "too many set": (machine._thread_settings, ({"OMP_NUM_THREADS": "64"}, 8, 8), "warning", "", ""),
    "no number set": (machine._thread_settings, ({"OMP_NUM_THREADS": "many"}, 8, 8), "warning", "", ""),
    "two levels set": (machine._thread_settings, ({"MKL_NUM_THREADS": "4,2"}, 8, 8), "ok", "", ""),
    "CUDA, no GPU": (packages._torch, (BUILT, "", 0), "ok", "no NVIDIA GPU was found", ""),
    "no CUDA, no GPU": (packages._torch, (CPU, "", 0), "ok", "no NVIDIA GPU was found", ""),
    "two GPUs": (packages._torch, ({**BUILT, "gpus": ["NVIDIA H100"] * 2, "driver": 13020}, "", 2), "ok",
                 "sees 2 GPUs: NVIDIA H100; the driver supports CUDA 13.2", ""),
    "GPU, no CUDA": (packages._torch, ({**CPU, "driver": 12040}, "", 1), "problem",
                     "it is a build without CUDA", "cu12x"),
    "no driver": (packages._torch, (BUILT, "", 1), "problem", "no driver that programs can use",
                  "--gpus all"),
    "old driver": (packages._torch, ({**BUILT, "driver": 12040}, "", 1), "problem",
                   "built for CUDA 13.2, and the driver supports 12.4 at most", "12.x"),
    "GPU fails": (packages._torch, ({**BUILT, "driver": 13020, "why_no_gpus": "error 802"}, "", 1), "problem",
                  "error 802", "torch.zeros(1).cuda()"),
    "torch crashes": (packages._torch, ({"driver": 13020}, SIGILL, 0), "problem", "SIGILL", ""),
    "torch without NumPy": (packages._torch, ({**BUILT, "why_no_numpy": "Numpy is not available"}, "", 0),
                            "problem", "", "numpy<2"),
    "other torchvision": (packages._torchvision, (NMS, "", VISION), "problem",
                          "0.29.2 cannot be imported beside torch 2.15.0+cpu", "whl/cu132"),
    "other torchvision, CPU": (packages._torchvision, ({**NMS, "cuda": None}, "", VISION), "problem", "",
                               "--index-url https://download.pytorch.org/whl/cpu"),
    "torchvision crashes": (packages._torchvision, (WITHOUT, "it crashed with SIGSEGV", VISION), "problem",
                            "SIGSEGV", ""),
    "no torchvision": (packages._torchvision, ({**WITHOUT, "why_no_torchvision": "not installed"}, "", {}),
                       "warning", "", "pip install torch torchvision"),
    "torchvision of another torch": (packages._torchvision, (BUILT, "", VISION), "warning",
                                     "was built for torch 2.14.1", ""),
    "TensorFlow": (packages._tensorflow, (Answer("2.21.0"), TF), "ok", "", ""),
    "TensorFlow of another NumPy": (packages._tensorflow, (Answer(None, "ImportError: numpy.core"), TF),
                                    "problem", "with NumPy 2.4.6: ImportError", ""),
    "two TensorFlows": (packages._tensorflow, (Answer("2.21.0"), {**TF, "tensorflow": "2.20.0"}), "warning",
                        "both installed", "pip uninstall tensorflow tensorflow-cpu"),
    "DALI of another CUDA": (packages._distributions, ({DALI: "2"}, "13.2", 1, None), "warning", "",
                             "nvidia-dali-cuda130"),
    "nvImageCodec of another CUDA": (packages._distributions, ({CU12: "1"}, "13.2", 1, None), "warning", "",
                                     CU13),
    "two nvImageCodecs": (packages._distributions, ({CU12: "1", CU13: "1"}, "", 0, None), "warning", "",
                          "install one of them"),
    "DALI crashes": (packages._distributions, ({}, "", 0, Answer(None, SIGILL)), "problem", "SIGILL", ""),
}  # fmt: skip


@pytest.mark.parametrize(("check", "given", "state", "text", "remedy"), FINDINGS.values(), ids=FINDINGS)
def test_each_finding_has_its_state_its_text_and_its_remedy(
    check: Any, given: Any, state: str, text: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(packages.metadata, "requires", lambda _: ["numpy", "torch==2.14.1"])
    found = check(*given)
    found = list(found) if not hasattr(found, "state") else [found]
    worst = [one for one in found if one.state != "ok"] or found[-1:]
    assert [one.state for one in worst] == [state] or (state == "problem" and worst[0].state == state)
    assert text in worst[0].text and remedy in worst[0].remedy


def test_packages_of_nvidia_that_fit_or_do_not_matter_are_no_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    for installed, cuda, gpus in (
        ({"nvidia-dali-cuda130": "2.4", "nvidia-nvimgcodec-cu13": "0.9"}, "13.2", 1),
        ({"nvidia-nvimgcodec-cu12": "0.9"}, "13.2", 0),  # on the CPU it does not matter
        ({"nvidia-nvimgcodec-cu12": "0.9"}, "", 1),
    ):
        assert all(one.state == "ok" for one in packages._distributions(installed, cuda, gpus, None))
    monkeypatch.setattr(packages.metadata, "requires", lambda _: ["torch (==2.15.0)"])
    assert all(one.state == "ok" for one in packages._torchvision(BUILT, "", VISION))
    assert not list(packages._torchvision({}, "it crashed with SIGILL", {}))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = list(packages._torch({**BUILT, "driver": 13020}, "", 1))[-1]
    assert found.state == "warning" and "CUDA_VISIBLE_DEVICES='' hides them" in found.text


def test_the_machine_of_this_process_is_examined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000")
    found = [one for one in machine.check_cores(Examined()) if "1000 ranks" in one.text]
    assert [one.state for one in found] == ["warning"]
    monkeypatch.setattr(machine, "free_memory", lambda: 1 << 28)
    monkeypatch.setattr(ControlGroups, "table", lambda *_: {"oom_kill": 3})
    found = list(machine.check_memory(Examined()))
    assert [one.state for one in found][:2] == ["warning", "warning"]
    assert "256 MiB are free" in found[0].text and "memory ran out: 3" in found[1].text
    texts = " ".join(one.text for one in machine.check_limits(Examined()))
    assert "ulimit -n" in texts and "processes and threads" in texts
    monkeypatch.setattr(machine, "default_threads", lambda: 4)
    for count, state in ((4, "ok"), (64, "warning")):
        last = list(machine.check_threads(Examined(torch={"threads": count})))[-1]
        assert last.state == state and last.remedy in ("", "export OMP_NUM_THREADS=4")


def test_decoders_that_crash_are_missing_or_slower_are_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    examined, answer = Examined(), Answer(None, "it crashed with SIGILL")
    monkeypatch.setattr(decoding, "ask", lambda *_, **__: answer)
    (found,) = decoding.check(examined)
    assert found.state == "problem" and "SIGILL" in found.text
    rates = {
        "dali": {"why": "MissingDependencyError: not installed"},
        "native core": {"what": "the native core, the needed region only", "rate": 500.0},
        "pillow": {"what": "Pillow-SIMD 9.5.0.post2, the whole image", "rate": 900.0},
    }
    used = {"chosen": "native core", "used": "JPEG → native core"}
    answer = Answer({"of": "photographs", "decoders": rates, **used})
    every = list(decoding.check(examined))
    assert [one.text for one in every if one.state != "ok"] == [
        "dali cannot be used: not installed",
        "pillow decodes 1.8 times as many of these images a second",
    ]
    assert examined.images_s == 500.0 and any("Pillow-SIMD 9.5.0.post2" in one.text for one in every)
