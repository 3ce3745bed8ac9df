"""Behaviours of every chain of augmentations: the same bits whatever the memory, threads, neighbours and process."""

from __future__ import annotations

import contextlib
import gc
import itertools
import pickle
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from augmentations import CHAINS, DTYPES, batch_for, by_torch, seeded
from torch import Tensor
from torchvision import tv_tensors

from fastpipe import FastLoader, augment
from fastpipe.core.native import native
from fastpipe.core.types import Key

OF_FLOATS = ("SpecAugment", "nnU-Net", "other volumes", "motion")
PAIRS = pytest.mark.parametrize(("case", "dtype"), [
    pytest.param(case, dtype, id=f"{case}, {str(dtype)[6:]}") for case in CHAINS for dtype in DTYPES[case in OF_FLOATS :]
])  # fmt: skip


def others_of(chain: Any, batch: Tensor, numbers: Any) -> list[Tensor]:
    """Return the chain's other inputs: class indices to mix, voxel labels, or lengths."""
    if any(op.mixes for op in chain.ops):
        return [torch.from_numpy(numbers % 2)]
    if batch.ndim == 5:
        return [(batch[:, 0] > 0).byte()]
    return [torch.from_numpy(numbers * 7 % batch.shape[1] + 1)] if batch.shape[-1] == 3 else []


def run(chain: Any, batch: Tensor, numbers: Any = None, **how: Any) -> list[Tensor]:
    """The samples of these numbers after a chain, and what goes with them."""
    numbers = np.arange(len(batch)) if numbers is None else numbers
    others = others_of(chain, batch, numbers)
    found = chain(batch, *others, **(how or {"key": Key(3, 1, numbers)}))
    return list(found) if others else [found]


def same_bits(one: list[Tensor], other: list[Tensor]) -> bool:
    """Equal, also in the signs of zeros; NaN is NaN."""

    def bits(values: Tensor) -> Any:
        values = values.detach().clone(memory_format=torch.contiguous_format)
        if values.is_floating_point():
            values[values.isnan()] = torch.nan
        return values.dtype, values.shape, values.view(torch.uint8).numpy().tobytes()

    return [bits(values) for values in one] == [bits(values) for values in other]


@pytest.fixture
def restored() -> Iterator[None]:
    """The instruction set and the number of threads are those of before."""
    level, threads = native.level(), torch.get_num_threads()
    yield
    assert native.force_level(level)
    torch.set_num_threads(threads)


def part_of_more(batch: Tensor) -> Tensor:
    whole = torch.full([side + 3 for side in batch.shape], 77).to(batch.dtype)
    inner = whole[tuple(slice(1, -2) for _ in batch.shape)]
    return inner.copy_(batch)


def at_an_odd_address(batch: Tensor) -> Tensor:
    memory = bytearray(batch.numel() * batch.element_size() + 1)
    found = torch.frombuffer(memory, dtype=batch.dtype, offset=1, count=batch.numel())
    return found.view(batch.shape).copy_(batch)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "last dimension first": lambda batch: batch.movedim(-1, 1).contiguous().movedim(1, -1),
    "second dimension last": lambda batch: batch.movedim(1, -1).contiguous().movedim(-1, 1),
    "samples last": lambda batch: batch.movedim(0, -1).contiguous().movedim(-1, 0),
    "a part of more": part_of_more,
    "every second": lambda batch: batch.repeat_interleave(2, -1).repeat_interleave(2, 1)[:, ::2, ..., ::2],
    "an odd address": at_an_odd_address,
    "inference": torch.inference_mode()(Tensor.clone),
    "recorded": lambda batch: batch.clone().requires_grad_(batch.is_floating_point()),
    "one sample for all": lambda batch: batch[:1].expand_as(batch),
    "one channel, or frame, for all": lambda batch: batch[:, :1].expand_as(batch),
    "one row for all": lambda batch: batch[:, :, :1].expand_as(batch),
    "one column for all": lambda batch: batch[..., :1].expand_as(batch),
}


@pytest.mark.few(8)
@PAIRS
def test_memory_changes_no_bit(case: str, dtype: torch.dtype) -> None:
    chain, batch = CHAINS[case], batch_for(CHAINS[case], dtype)
    for name, layout in LAYOUTS.items():
        with torch.no_grad():
            given = layout(batch)
            before = given.clone(memory_format=torch.contiguous_format)
            found = run(chain, given)
            assert same_bits(found, run(chain, before.detach())), name
            assert not found[0].requires_grad and not found[0].is_inference(), name
            assert torch.equal(given, before), name
            assert found[0].untyped_storage().data_ptr() != given.untyped_storage().data_ptr(), name
    if batch.ndim == 4 and case != "motion":
        assert same_bits(run(chain, tv_tensors.Image(batch)), run(chain, batch))
        last = run(chain, batch.contiguous(memory_format=torch.channels_last))[0]
        assert last.is_contiguous(memory_format=torch.channels_last) and not last.is_contiguous()


@pytest.mark.few(10)
@PAIRS
def test_instruction_sets_threads_and_neighbours_change_no_bit(case: str, dtype: Any, restored: None) -> None:
    chain, batch = CHAINS[case], batch_for(CHAINS[case], dtype)
    wanted, best = run(chain, batch), native.level()
    for level in range(best + 1):
        assert native.force_level(level)
        assert same_bits(run(chain, batch), wanted), level
    for threads in (1, 2, 64):
        torch.set_num_threads(threads)
        assert same_bits(run(chain, batch), wanted), threads
    if not any(op.mixes for op in chain.ops):
        last = len(batch) - 1
        for rows in (np.array([last, 3]), np.array([2]), np.arange(3)):
            assert same_bits(run(chain, batch[rows], rows), [values[rows] for values in wanted])


@pytest.mark.parametrize("case", [case for case in CHAINS if case != "nothing"])
def test_keys_and_seeds_decide_the_result(case: str, same_generators: None) -> None:
    chain, batch = CHAINS[case], batch_for(CHAINS[case])
    keys = [Key(seed, epoch, np.arange(len(batch))) for seed, epoch in ((3, 1), (3, 2), (4, 1))]
    torch.manual_seed(5)
    state = torch.get_rng_state()
    drawn = [run(chain, batch, generator=None) for _ in range(2)]  # torch's global one
    results = [*drawn, *(run(chain, batch, key=key) for key in keys)]
    results += [run(chain, batch, generator=seeded(1)), run(chain, batch, generator=seeded(2))]
    for one, other in itertools.combinations(results, 2):
        assert not torch.equal(one[0], other[0])
    torch.set_rng_state(state)
    assert all(same_bits(run(chain, batch, generator=None), one) for one in drawn)
    torch.set_rng_state(state)
    for _ in range(2):
        torch.empty((), dtype=torch.int64).random_()  # a batch takes one number
    generator = torch.Generator()
    generator.set_state(state)
    for _ in range(2):
        run(chain, batch, generator=generator)
    assert torch.equal(generator.get_state(), torch.get_rng_state())


@pytest.mark.parametrize("case", CHAINS)
def test_a_chain_is_its_operations_one_after_the_other_and_the_reference(case: str) -> None:
    chain, batch = CHAINS[case], batch_for(CHAINS[case])[:12]
    parameters = chain.draw(batch.shape, generator=seeded(2))
    found, wanted = chain.apply(batch, parameters), chain.reference(batch, parameters)

    def far(one: Tensor, other: Tensor) -> float:
        return float(((one - other).abs() > 1e-3 * wanted.abs().clamp(min=1)).float().mean())

    if not chain.fuse:  # which has tests of its own
        # A policy has steps, beside which floats that differ by rounding fall on either side.
        assert far(found, wanted) < (0.01 if case.startswith("DeiT") else 0.0001)
        assert far(by_torch(chain._chain.steps, batch, parameters), found) < 0.01
        step = batch
        for op, one in zip(chain.ops, parameters, strict=True):
            step = op.apply(step, one)
        assert torch.equal(found, step) if case not in OF_FLOATS else far(found, step) == 0
    for copied in (pickle.loads(pickle.dumps(chain)), CHAINS[case]):
        assert repr(copied) == repr(chain) and same_bits(run(copied, batch), run(chain, batch))


@pytest.mark.few(2)
@pytest.mark.parametrize("case", ["SimCLR", "DeiT", "fused", "nnU-Net", "motion"])
def test_a_compiled_chain_is_the_same(case: str, same_generators: None, monkeypatch: Any) -> None:
    # torch's compiler counts with it, and its thread would stay.
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)
    chain = CHAINS[case]
    batch, is_images = batch_for(chain)[:6], case not in OF_FLOATS
    others = others_of(chain, batch, np.arange(len(batch)))
    compiled = torch.compile(
        lambda *given: chain(*given), backend="aot_eager" if is_images else "eager", fullgraph=is_images
    )
    torch.manual_seed(5)
    wanted = [chain(batch, *others) for _ in range(2)]
    torch.manual_seed(5)
    for one in wanted:
        found = compiled(batch, *others)
        assert all(map(torch.equal, found, one)) if others else torch.equal(found, one)


@pytest.mark.parametrize("case", ["SimCLR", "nnU-Net", "motion"])
def test_a_loader_repeats_an_epoch_by_its_seed(case: str) -> None:
    chain, batch = CHAINS[case], batch_for(CHAINS[case])[:6]
    others = others_of(chain, batch, np.arange(6))
    dataset = torch.utils.data.TensorDataset(batch, *others, torch.arange(6))
    loader: Any = FastLoader(dataset, batch_size=3, augment=chain, seed=4)
    first = [[part.clone() for part in one] for one in loader]
    assert torch.cat([one[-1] for one in first]).tolist() == list(range(6))
    assert all(one[0].shape != batch[:3].shape or not torch.equal(one[0], batch[:3]) for one in first)
    loader.set_epoch(0)
    for one, other in zip(first, loader, strict=True):
        assert all(map(torch.equal, one, other))


def test_many_calls_at_once_give_the_same() -> None:
    cases = ("SimCLR", "DeiT", "fused, rotated", "other volumes", "motion")
    batches = {case: batch_for(CHAINS[case]) for case in cases}
    wanted = {case: run(CHAINS[case], batches[case]) for case in cases}
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda case: run(CHAINS[case], batches[case]), cases * 10))
    assert all(map(same_bits, found, [wanted[case] for case in cases * 10]))


def test_a_process_that_is_forked_while_a_batch_is_made_goes_on(in_child: Any, restored: None) -> None:
    torch.set_num_threads(4)
    chain, stop, begun = CHAINS["SimCLR"], threading.Event(), threading.Event()
    images = batch_for(chain)
    wanted = run(chain, images)

    def go_on() -> None:
        while not stop.is_set():
            assert same_bits(run(chain, images), wanted)
            begun.set()

    def check() -> None:  # not by torch's operations, whose threads are not in a child
        assert np.array_equal(run(chain, images)[0].numpy().view(np.uint8), wanted[0].numpy().view(np.uint8))

    with ThreadPoolExecutor(1) as pool:
        going = pool.submit(go_on)
        try:
            assert begun.wait(60)
            for _ in range(3):
                in_child(check)
        finally:
            stop.set()
        going.result()


def test_ctrl_c_between_batches_leaves_nothing_half_done() -> None:
    chain, images, begun = CHAINS["DeiT"], batch_for(CHAINS["DeiT"]), threading.Event()
    wanted, main = run(chain, images), threading.get_ident()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: begun.wait(60) and signal.pthread_kill(main, signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            while True:
                run(chain, images)
                begun.set()
    assert same_bits(run(chain, images), wanted)


def test_threads_keep_nothing_of_a_batch_even_if_it_failed() -> None:
    class Failing(augment.RandomHorizontalFlip):
        def on_tensors(self, images: Tensor, columns: Any, of_bytes: bool) -> Tensor:
            raise RuntimeError("fails")

    flip = augment.RandomVerticalFlip()
    for ops in ([flip, augment.Normalize([0.5] * 3, [0.5] * 3)], [flip, Failing(1.0)]):
        chain, images = augment.Compose(ops), torch.rand(4, 3, 8, 8)
        given = weakref.ref(images)
        with contextlib.suppress(RuntimeError):
            made = chain(images)
            del made
        del images
        for _ in range(3000):  # a thread may just be releasing it
            gc.collect()
            if given() is None:
                break
            threading.Event().wait(0.01)
        assert given() is None
        assert len(chain._chain.memory._free) == 1


def test_numbers_near_zero_are_kept_where_the_script_flushes_them(restored: None) -> None:
    op = augment.Compose([augment.RandomHorizontalFlip(1.0), augment.RandomGain((0.0, 0.0))])
    small = torch.full((4, 1, 8, 9), 2.0**-130)
    tiny = torch.full((4, 1, 8, 9), 2.0**-24, dtype=torch.float16)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush them")
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            for images in (small, tiny):
                assert np.array_equal(op(images).numpy().view(np.uint8), images.numpy().view(np.uint8))
        assert float(small[0, 0, 0, 0] * 1.0) == 0  # still
    finally:
        torch.set_flush_denormal(False)
