"""torch's own threads and the decoding threads."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from threadpoolctl import threadpool_info

from fastpipe import FastImageFolder, FastLoader
from fastpipe.torch.threads import do_without_helpers

_OPENMP = any(library["user_api"] == "openmp" for library in threadpool_info())

pytestmark = pytest.mark.skipif(
    not _OPENMP, reason="install a torch that splits operations by OpenMP, as the wheels for Linux do"
)


def _in_a_thread(function: Any) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


@pytest.fixture(autouse=True)
def _three_threads() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_it_holds_for_the_thread_that_calls_it_only() -> None:
    def limited() -> tuple[int, int]:
        do_without_helpers()
        torch.rand(512, 512).exp_()  # torch's own setting up, at the first operation, does not undo it
        return torch.get_num_threads(), _in_a_thread(torch.get_num_threads)

    assert _in_a_thread(limited) == (1, 3)
    assert torch.get_num_threads() == 3
    assert _in_a_thread(torch.get_num_threads) == 3


def test_transforms_in_decoding_threads_run_without_helpers(photo_tree: Path) -> None:
    seen: dict[str, int] = {}

    def transform(image: Any) -> torch.Tensor:
        seen[threading.current_thread().name] = torch.get_num_threads()
        return torch.zeros(1)

    for safe in (True, False):
        dataset = FastImageFolder(str(photo_tree), transform, thread_safe=safe, threads=2)
        for _ in FastLoader(dataset, 4):
            pass
    main = seen.pop(threading.current_thread().name)
    assert main == 3
    assert set(seen.values()) == {1}
