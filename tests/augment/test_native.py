"""The native kernels of images and spectrograms: any images, parameters, memory, instruction set and threads."""

from __future__ import annotations

import copy
import pickle
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchvision import tv_tensors

from fastpipe import augment
from fastpipe.augment.base import Augmentation, applied_table
from fastpipe.augment.chains import BatchTransform, Columns, on_device
from fastpipe.augment.steps import Step
from fastpipe.core.native import native
from fastpipe.errors import AugmentError

Make = Callable[..., Tensor]

UINT8, FLOAT32 = torch.uint8, torch.float32
DTYPES = (UINT8, FLOAT32, torch.float16, torch.bfloat16)

IMAGE_OPS: dict[str, BatchTransform] = {
    "flip": augment.RandomHorizontalFlip(),
    "vertical flip": augment.RandomVerticalFlip(),
    "grey": augment.RandomGrayscale(0.5),
    "jitter": augment.ColorJitter(0.8, 0.8, 0.8, 0.5),
    "blur": augment.GaussianBlur((3, 1), (0.1, 3.0)),
    "crop": augment.RandomResizedCrop((9, 14)),
    "crop to a pixel": augment.RandomResizedCrop(1, scale=(0.2, 1.0)),
    "bicubic crop": augment.RandomResizedCrop((17, 3), interpolation="bicubic"),
    "nearest crop": augment.RandomResizedCrop((9, 14), interpolation="nearest"),
    "affine": augment.RandomAffine(40, (0.3, 0.2), (0.6, 1.5), (-20, 20, -10, 10), "bilinear", 0.5),
    "affine without a fill": augment.RandomAffine(180, (1.0, 1.0), (0.6, 1.5), 20, "bilinear", None),
    "affine that fills in no byte": augment.RandomAffine(45, fill=-1.75),
    "nearest affine": augment.RandomAffine(180, (0.3, 0.2), (0.6, 1.5), 20, fill=1.0),
    "rotation": augment.RandomRotation(90, "bilinear"),
    "erasing": augment.RandomErasing(0.7, value=0.7),
    "erasing with no byte": augment.RandomErasing(0.7, value=300.5),
    "sometimes": augment.RandomApply([augment.RandomVerticalFlip(), augment.RandomRotation(20)]),
    "floats": augment.ToDtype(torch.float32),
    "cut": augment.CutMix(num_classes=2),
}
FLOAT_OPS: dict[str, BatchTransform] = {
    "normalise": augment.Normalize([0.4], [0.25]),
    "bytes": augment.ToDtype(torch.uint8),
    "masks": augment.SpecAugment(2, 3, 1, 2, p=0.9),
    "masks of zeros": augment.SpecAugment(1, 3, 2, 2, p=0.9, zero_masking=True),
    "gain": augment.RandomGain(12.0),
    "gain of decibels": augment.RandomGain(12.0, "decibel"),
    "shift": augment.TimeShift(1.0),
    "shift of frames": augment.TimeShift(0.5, rolls=False, fill=-1.0),
    "mixed": augment.MixUp(num_classes=2, per_sample=True),
}
OPS = IMAGE_OPS | FLOAT_OPS
# Of bytes: levels that values may differ by, beside a step; those that are not here are equal.
_LEVELS = {"jitter": 3, "blur": 1, "affine": 1, "affine without a fill": 1, "rotation": 1, "sometimes": 1}
_EPSILON = {FLOAT32: 0.0, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


def simclr() -> augment.Compose:
    jitter = augment.ColorJitter(0.8, 0.8, 0.8, 0.2)
    return augment.Compose(
        [
            augment.RandomResizedCrop((31, 37)), augment.RandomHorizontalFlip(),
            augment.RandomApply(jitter, 0.8), augment.RandomGrayscale(0.2),
            augment.RandomApply(augment.GaussianBlur(5)), augment.ToDtype(torch.float32),
            augment.Normalize([0.4, 0.5, 0.6], [0.2, 0.3, 0.4]),
        ]
    )  # fmt: skip


def deit(interpolation: str = "bicubic") -> augment.Compose:
    return augment.Compose(
        [
            augment.RandomResizedCrop((31, 37), interpolation=interpolation),
            augment.RandomHorizontalFlip(), augment.RandAugment(3, 9, interpolation="bilinear", fill=0.4),
            augment.ToDtype(torch.float32), augment.Normalize([0.4, 0.5, 0.6], [0.2, 0.3, 0.4]),
            augment.RandomErasing(0.5, value="random"), augment.MixUp(num_classes=2, per_sample=True),
        ]
    )  # fmt: skip


def fused(rotates: bool) -> augment.Compose:
    turn = [augment.RandomAffine(20, (0.1, 0.1), (0.9, 1.4), 5, fill=0.5)] if rotates else []
    ops: list[Augmentation] = [*simclr().ops[:2], *turn, *simclr().ops[2:]]
    return augment.Compose(ops, fuse=True)


def heard() -> augment.Compose:
    return augment.Compose(
        [augment.TimeShift(0.2), augment.RandomGain(6.0), augment.SpecAugment(2, 20, 2, 10)]
    )


CHAINS: dict[str, augment.Compose] = {
    "SimCLR": simclr(), "DeiT": deit(), "DeiT, nearest": deit("nearest"), "fused": fused(False),
    "fused, rotated": fused(True), "SpecAugment": heard(), "nothing": augment.Compose([]),
}  # fmt: skip


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def labelled(chain: Any, images: Tensor, seed: int = 0) -> Tensor:
    """The images after a chain, whether it needs labels or not."""
    ops = chain.ops if isinstance(chain, augment.Compose) else [chain]
    others = [torch.arange(len(images)) % 2] if any(op.mixes for op in ops) else []
    found = chain(images, *others, generator=seeded(seed))
    changed: Tensor = found[0] if others else found
    return changed


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Equal, also in the signs of zeros; NaN is NaN."""
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[one.element_size()]
    pair = [
        torch.where(x.isnan(), torch.full_like(x, torch.nan), x) if x.dtype != UINT8 else x
        for x in (one, other)
    ]
    first, second = (x.contiguous().view(words) for x in pair)
    return one.dtype == other.dtype and torch.equal(first, second)


@pytest.fixture
def at_level() -> Iterator[Callable[[int], bool]]:
    """Forces an instruction set, if the processor has it; afterwards it is that of before."""
    before = native.level()
    yield native.force_level
    assert native.force_level(before)


@pytest.fixture
def with_threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


# ---- the reference -------------------------------------------------------------------------------


def near(found: Tensor, wanted: Tensor, case: str) -> None:
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    if wanted.dtype == UINT8:
        apart = (found.int() - wanted.int()).abs()
        apart = torch.minimum(apart, 256 - apart) if "no byte" in case else apart
        assert apart.max() <= _LEVELS.get(case, 0)
    else:
        scale = 1 + wanted.float().abs()
        assert ((found.float() - wanted.float()).abs() <= (1e-5 + _EPSILON[wanted.dtype]) * scale).all()


def uniforms(draws: int, count: int) -> st.SearchStrategy[list[float]]:
    """Uniform numbers, of which many are the least or the greatest there is."""
    ends = st.sampled_from([0.0, float(np.nextafter(1, 0)), 0.5])
    one = ends | st.floats(0, 1, exclude_max=True, width=32)
    return st.lists(one, min_size=draws * count, max_size=draws * count)


@settings(max_examples=40)
@pytest.mark.parametrize("case", OPS)
@given(data=st.data())
def test_any_images_are_the_references(case: str, data: st.DataObject) -> None:
    op = OPS[case]
    # Of halves torchvision makes bytes by a product of halves, which is another one.
    last = 2 if case == "bytes" else 4
    dtype = data.draw(st.sampled_from(DTYPES[case in FLOAT_OPS : last]))
    channels = data.draw(st.sampled_from(op.channels or (1, 2, 3, 4, 13)))
    least = 2 if case == "blur" else 1
    side = st.sampled_from([2, 3, 4, 7, 16, 33] if least == 2 else [1, 2, 3, 4, 7, 16, 33])
    shape = (data.draw(st.integers(1, 3)), channels, data.draw(side), data.draw(side))
    values = torch.rand(shape, generator=seeded(data.draw(st.integers(0, 99))))
    images = (values * 255).round().to(UINT8) if dtype == UINT8 else values.to(dtype)
    draws = op.draws_for(channels)
    u = np.array(data.draw(uniforms(draws, shape[0]))).reshape(shape[0], draws)
    parameters = augment.Parameters.of_table(op.names_for(channels), op.table(u, shape[1:]))
    layout = data.draw(st.sampled_from(LAYOUTS))
    try:
        wanted = op.reference(images, parameters)
    except RuntimeError as wrong:  # torch, of bytes of some images one pixel wide
        assume("INTERNAL ASSERT FAILED" not in str(wrong))
        raise
    near(op.apply(laid_out(images, layout), parameters), wanted, case)


def test_bytes_of_floats_outside_of_the_range_are_torchs() -> None:
    op = augment.ToDtype(UINT8)
    images = torch.tensor([-3.0, -0.1, -0.001, 0, 1, 1.001, 1.1, 7, 1e6]).view(1, 1, 3, 3)
    parameters = op.draw(images.shape)
    assert torch.equal(op.apply(images, parameters), op.reference(images, parameters))


@pytest.mark.parametrize("fill", [-1.0, 300.0, (-1.0, 300.0, 7.0)])
@pytest.mark.parametrize("interpolation", ["nearest", "bilinear"])
def test_a_fill_that_is_no_byte_is_one_before_the_next_change(
    fill: Any, interpolation: str, make_images: Make
) -> None:
    chain = augment.Compose(
        [
            augment.RandomRotation(45, interpolation, fill), augment.RandomErasing(1.0, value=fill),
            augment.RandomResizedCrop(24, interpolation="bicubic"), augment.ColorJitter(0.4),
        ]
    )  # fmt: skip
    images = make_images(UINT8)
    parameters = chain.draw(images.shape, generator=seeded())
    step = images
    for op, one in zip(chain.ops, parameters, strict=True):
        step = op.apply(step, one)
    assert torch.equal(chain.apply(images, parameters), step)
    assert ((step.int() - chain.reference(images, parameters).int()).abs() > 1).float().mean() < 0.01


# What is not finite spreads as in the reference, but for these, which do not multiply by what counts for nothing, or
# multiply by it where torch does not.
_SPREADS_OTHERWISE = {
    "crop", "crop to a pixel", "bicubic crop",  # weights of 0 beside the filter's
    "blur",  # weights below 2**-30 of the sum
    "bytes",
}  # fmt: skip


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("case", [case for case in OPS if case not in _SPREADS_OTHERWISE])
def test_what_is_not_finite_spreads_as_in_the_reference(
    case: str, dtype: torch.dtype, value: float, make_images: Make
) -> None:
    op, images = OPS[case], make_images(dtype)
    images[:, 0, 11, 13] = value
    images[3:, 1, 20:22, 30:33] = value
    parameters = op.draw(images.shape, generator=seeded())
    found, wanted = op.apply(images, parameters), op.reference(images, parameters)
    for look in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(look(found), look(wanted))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("case", sorted(_SPREADS_OTHERWISE))
def test_what_is_not_finite_stays_near_elsewhere(case: str, value: float, make_images: Make) -> None:
    """No number far from it changes."""
    op, images = OPS[case], make_images()
    parameters = op.draw(images.shape, generator=seeded())
    before = op.apply(images, parameters)
    images[:, :, 11, 13] = value
    changed = (op.apply(images, parameters) != before).float().mean((1, 2, 3))
    assert changed.max() <= (1 if case == "crop to a pixel" else 0.6) and (changed == 0).sum() < 12


# ---- memory --------------------------------------------------------------------------------------

LAYOUTS = (
    "contiguous",
    "channels last",
    "transposed",
    "part",
    "every second",
    "odd address",
    "inference",
    "recorded",
)


def laid_out(images: Tensor, layout: str) -> Tensor:
    """The same images in memory of another kind."""
    count, channels, height, width = images.shape
    if layout == "channels last":
        return images.contiguous(memory_format=torch.channels_last)
    if layout == "transposed":
        return images.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)
    if layout == "part":
        whole = torch.full((count + 1, channels + 2, height + 3, width + 5), 77).to(images.dtype)
        whole[1:, 1:-1, 2:-1, 3:-2] = images
        return whole[1:, 1:-1, 2:-1, 3:-2]
    if layout == "every second":
        return images.repeat_interleave(2, -1).repeat_interleave(2, 1)[:, ::2, :, ::2]
    if layout == "odd address":
        memory = bytearray(images.numel() * images.element_size() + 1)
        found = torch.frombuffer(memory, dtype=images.dtype, offset=1, count=images.numel()).view(
            images.shape
        )
        return found.copy_(images)
    if layout == "inference":
        with torch.inference_mode():
            return images.clone()
    if layout == "recorded" and images.dtype != UINT8:
        return images.detach().requires_grad_()
    return images.contiguous()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CHAINS)
def test_memory_changes_no_bit(case: str, dtype: torch.dtype, make_images: Make) -> None:
    chain = CHAINS[case]
    if case == "SpecAugment" and dtype == UINT8:
        return
    images = make_images(dtype)
    wanted = labelled(chain, images)
    with torch.no_grad():
        for layout in LAYOUTS:
            given_images = laid_out(images, layout)
            before = given_images.clone()
            found = labelled(chain, given_images)
            assert same_bits(found, wanted), layout
            assert not found.requires_grad and not found.is_inference() and torch.equal(given_images, before)
    assert same_bits(labelled(chain, tv_tensors.Image(images)), wanted)


@pytest.mark.parametrize("case", CHAINS)
def test_one_image_for_many_and_one_channel_for_three(case: str, make_images: Make) -> None:
    chain, images = CHAINS[case], make_images()
    for expanded in (images[:1].expand(12, -1, -1, -1), images[:, :1].expand(-1, 3, -1, -1),
                     images[:, :, :1].expand(-1, -1, 40, -1), images[..., :1].expand(-1, -1, -1, 52)):  # fmt: skip
        assert same_bits(labelled(chain, expanded), labelled(chain, expanded.contiguous()))


@pytest.mark.parametrize(
    "shape", [(1, 3, 1, 1), (2, 3, 1, 3000), (2, 3, 3000, 1), (1, 3, 1500, 1700)], ids=str
)
def test_sides_of_one_pixel_and_of_thousands(shape: tuple[int, ...]) -> None:
    images = torch.rand(shape, generator=seeded())
    chain = augment.Compose([*deit().ops[:-1]])
    parameters = chain.draw(shape, generator=seeded(1))
    found, wanted = chain.apply(images, parameters), chain.reference(images, parameters)
    assert ((found - wanted).abs() > 1e-3).float().mean() < 0.01


# ---- instruction sets and threads ----------------------------------------------------------------


@pytest.mark.parametrize("dtype", [UINT8, FLOAT32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CHAINS)
def test_instruction_sets_change_no_bit(
    case: str, dtype: torch.dtype, make_images: Make, at_level: Callable[[int], bool]
) -> None:
    if case == "SpecAugment" and dtype == UINT8:
        return
    images, chain = make_images(dtype), CHAINS[case]
    for seed in range(4):
        found = [labelled(chain, images, seed) for level in range(3) if at_level(level)]
        assert all(same_bits(one, found[0]) for one in found)


@pytest.mark.parametrize("dtype", [UINT8, FLOAT32], ids=str)
@pytest.mark.parametrize("case", CHAINS)
def test_threads_and_neighbours_change_no_bit(
    case: str, dtype: torch.dtype, make_images: Make, with_threads: Callable[[int], None]
) -> None:
    if case == "SpecAugment" and dtype == UINT8:
        return
    chain, images = CHAINS[case], make_images(dtype)
    parameters = chain.draw(images.shape, generator=seeded())
    found = []
    for threads in (1, 2, 8, 64):
        with_threads(threads)
        found.append(chain.apply(images, parameters))
    assert all(same_bits(one, found[0]) for one in found)
    if not any(op.mixes for op in chain.ops):
        for at in range(12):
            alone = chain.apply(images[at : at + 1], [one.rows(slice(at, at + 1)) for one in parameters])
            assert same_bits(alone, found[0][at : at + 1])


def test_many_calls_at_once(make_images: Make) -> None:
    chains = [CHAINS[case] for case in ("SimCLR", "DeiT", "fused, rotated")]
    images = make_images(UINT8)
    wanted = [labelled(chain, images, 5) for chain in chains]

    def run(number: int) -> bool:
        return same_bits(labelled(chains[number % 3], images, 5), wanted[number % 3])

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(run, range(120)))


def test_a_process_that_is_forked_while_a_batch_is_made(
    make_images: Make, in_child: Callable[[Callable[[], object]], None], with_threads: Callable[[int], None]
) -> None:
    with_threads(4)
    chain, images, stop, begun = CHAINS["SimCLR"], make_images(UINT8), threading.Event(), threading.Event()
    wanted = labelled(chain, images)
    failed = []

    def go_on() -> None:
        while not stop.is_set():
            if not same_bits(labelled(chain, images), wanted):
                failed.append(1)
            begun.set()

    def check() -> None:  # not by torch's operations, whose threads are not in a child
        assert np.array_equal(labelled(chain, images).numpy().view(np.uint8), wanted.numpy().view(np.uint8))

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        assert begun.wait(60)
        for _ in range(5):
            in_child(check)
    finally:
        stop.set()
        thread.join()
    assert not failed


def test_ctrl_c_between_batches_leaves_nothing_half_done(make_images: Make) -> None:
    chain, images, begun = CHAINS["DeiT"], make_images(UINT8), threading.Event()
    wanted, main = labelled(chain, images), threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        assert begun.wait(60)
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        while True:
            labelled(chain, images)
            begun.set()
    thread.join()
    assert same_bits(labelled(chain, images), wanted)


def test_numbers_near_zero_are_kept_where_the_script_flushes_them(
    with_threads: Callable[[int], None],
) -> None:
    op = augment.Compose([augment.RandomHorizontalFlip(1.0), augment.RandomGain((0.0, 0.0))])
    small = torch.full((4, 1, 8, 9), 2.0**-130)
    tiny = torch.full((4, 1, 8, 9), 2.0**-24, dtype=torch.float16)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush them")
    try:
        for threads in (1, 3):
            with_threads(threads)
            for images in (small, tiny):
                assert np.array_equal(op(images).numpy().view(np.uint8), images.numpy().view(np.uint8))
        assert float(small[0, 0, 0, 0] * 1.0) == 0  # still
    finally:
        torch.set_flush_denormal(False)


# ---- parameters of a script's own ----------------------------------------------------------------

_WILD = st.sampled_from([np.nan, np.inf, -np.inf, -1, -0.5, 0, 0.5, 1, 2.5, 7, 13, 40, 52, 1e9, -1e18, 1e300])


@settings(max_examples=25)
@pytest.mark.parametrize("case", [*OPS, "policy", "fused"])
@given(data=st.data())
def test_no_parameters_do_harm(case: str, data: st.DataObject) -> None:
    """They give images, the same at each instruction set, or an error."""
    policy = augment.RandAugment(2, interpolation="bilinear", fill=0.5)
    ops = fused(True) if case == "fused" else augment.Compose([policy if case == "policy" else OPS[case]])
    shape = (2, 3, *data.draw(st.sampled_from([(40, 52), (5, 64), (3, 3)])))
    images = torch.rand(shape, generator=seeded())
    if case in IMAGE_OPS and data.draw(st.booleans()):
        images = (images * 255).to(UINT8)
    parameters = ops.draw(shape, generator=seeded(data.draw(st.integers(0, 9))))
    for one in parameters:
        for at in np.ndindex(one.table.shape):
            if data.draw(st.integers(0, 2)) == 0:
                one.table[at] = data.draw(_WILD)
    before, found = native.level(), []
    try:
        for level in (0, 1, 2):
            if native.force_level(level):
                with np.errstate(all="ignore"):
                    found.append(ops.apply(images, parameters))
    except (AugmentError, np.linalg.LinAlgError, IndexError):
        assert not found
        return
    finally:
        native.force_level(before)
    assert all(same_bits(one, found[0]) for one in found)


def test_pixels_that_an_image_does_not_have_are_an_error(make_images: Make) -> None:
    images = make_images()
    for op, name, value in (
        (augment.RandomResizedCrop(8), "left", 52.0), (augment.RandomResizedCrop(8), "height", np.nan),
        (augment.RandomErasing(1.0), "top", -1.0), (augment.RandomErasing(1.0), "width", 53.0),
    ):  # fmt: skip
        parameters = op.draw(images.shape, generator=seeded())
        parameters[name][7] = value
        with pytest.raises(AugmentError, match=r"parameters of sample 7 of the batch are of pixels outside"):
            op.apply(images, parameters)


def test_images_that_are_too_large_to_be_resized_are_an_error() -> None:
    wide = torch.zeros(1, 1, 1, 1).expand(1, 1, 1, (1 << 24) + 1)
    with pytest.raises(AugmentError, match=r"the kernels take images of at most 2\*\*24 pixels a side"):
        augment.RandomResizedCrop(8)(wide)
    assert augment.RandomGain((0.0, 0.0))(wide).shape == wide.shape


# ---- operations of a script's own ----------------------------------------------------------------


class Inverted(BatchTransform):
    """Of a script's own, without kernels."""

    draws = 1
    names = ("least",)

    def table(self, u: Any, shape: Any) -> Any:
        return u * 0.5

    def on_tensors(self, images: Tensor, columns: Columns, of_bytes: bool) -> Tensor:
        bound = 255.0 if of_bytes else 1.0
        assert images.dtype == torch.float32
        return torch.where(images >= columns["least"].view(-1, 1, 1, 1) * bound, bound - images, images)


def _own_chains() -> dict[str, list[Augmentation]]:
    def own() -> BatchTransform:
        return Inverted()

    flip, crop, blur = augment.RandomHorizontalFlip(), augment.RandomResizedCrop(24), augment.GaussianBlur(3)
    inner = augment.RandomApply([own(), flip, augment.RandomApply([own(), blur], 0.7)], 0.6)
    return {
        "alone": [own()], "first": [own(), crop, flip], "last": [crop, flip, own()],
        "between": [crop, own(), blur], "twice": [own(), own(), flip], "inside": [flip, inner, crop],
        "before mixing": [own(), augment.CutMix(num_classes=2), own()],
        "to floats": [own(), augment.ToDtype(torch.float32), own(), augment.RandomGrayscale(0.5)],
        "nested": [augment.RandomApply([flip, augment.RandomApply([blur, flip], 0.5)], 0.5), own()],
    }  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("case", _own_chains())
def test_operations_of_a_scripts_own(case: str, fuse: bool, dtype: torch.dtype, make_images: Make) -> None:
    chain, images = augment.Compose(_own_chains()[case], fuse=fuse), make_images(dtype)
    parameters = chain.draw(images.shape, generator=seeded())
    found = chain.apply(images, parameters)
    tables = np.concatenate([one.table for one in parameters], axis=1)
    steps = chain._chain.steps
    applied = torch.from_numpy(applied_table(steps, tables, tuple(images.shape[1:]))).float()
    wanted = on_device(steps, images, applied)
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    apart = (found.float() - wanted.float()).abs() / (255 if found.dtype == UINT8 else 1)
    # Resized bytes are rounded once there, and those beside a threshold are inverted or not.
    assert (apart > 0.01).float().mean() < (0.01 if dtype == UINT8 else 0.002)
    assert same_bits(labelled(chain, laid_out(images, "channels last"), 1), labelled(chain, images, 1))
    if not fuse and dtype in (UINT8, FLOAT32):
        step = images
        for op, one in zip(chain.ops, parameters, strict=True):
            step = op.apply(step, one)
        assert same_bits(step, found)


class Turned(BatchTransform):
    """Of a script's own, by a product of matrices, which mixed precision would have in bfloat16."""

    def on_tensors(self, images: Tensor, columns: Columns, of_bytes: bool) -> Tensor:
        return images @ torch.eye(images.shape[-1]).flip(0)


def test_mixed_precision_is_for_the_model(make_images: Make) -> None:
    chain, images = augment.Compose([Turned(), augment.RandomVerticalFlip(1.0)]), make_images()
    with torch.autocast("cpu", torch.bfloat16):
        found = chain(images)
    assert torch.equal(found, images.flip(-1, -2))


class Misshapen(Inverted):
    def on_tensors(self, images: Tensor, columns: Columns, of_bytes: bool) -> Tensor:
        return images[:, :, 1:]


def test_an_operation_that_gives_another_shape_than_it_says_is_an_error(make_images: Make) -> None:
    with pytest.raises(AugmentError, match="the kernels take memory of the shape"):
        augment.Compose([Misshapen(), augment.RandomHorizontalFlip()])(make_images())


@pytest.mark.parametrize("case", [*OPS, *CHAINS])
def test_copies_do_the_same(case: str, make_images: Make) -> None:
    op, images = {**OPS, **CHAINS}[case], make_images()
    wanted = labelled(op, images)
    for made in (pickle.loads(pickle.dumps(op)), copy.copy(op), copy.deepcopy(op)):
        assert same_bits(labelled(made, images), wanted) and repr(made) == repr(op)


# ---- the binding ---------------------------------------------------------------------------------


def test_the_binding_refuses_what_does_not_fit() -> None:
    def plan(*steps: Step, columns: int = 1) -> Any:
        return native.AugmentPlan(list(steps), columns)

    def images(*shape: int, dtype: Any = np.float32) -> Any:
        return np.zeros(shape, dtype)

    flip, rows = plan(Step("flip", 0, (0,))), np.zeros((2, 1))
    good: Sequence[Any] = (flip, rows, images(2, 3, 4, 5), "float32", images(2, 3, 4, 5), "float32")
    native.run_here(native.augment_batch(*good))
    readonly = images(2, 3, 4, 5)
    readonly.flags.writeable = False
    wrong: list[tuple[int, Any]] = [
        (0, plan(Step("flip", 1, (0,)))), (0, plan(Step("flip", 0))), (0, plan(Step("crop", 0, (4, 5, 1)))),
        (1, np.zeros((3, 1))), (1, np.zeros((2, 2))), (1, np.zeros((2, 1), np.float32)), (1, np.zeros(2)),
        (1, np.zeros((4, 1))[::2]), (2, images(3, 3, 4, 5)), (2, images(2, 3, 4)),
        (2, images(2, 3, 4, 5, dtype=np.float64)), (2, images(2, 3, 4, 0)), (3, "float64"), (3, "uint8"),
        (4, images(2, 3, 4, 4)), (4, images(3, 3, 4, 5)), (4, readonly), (5, "uint8"), (5, "float16"),
    ]  # fmt: skip
    for at, value in wrong:
        arguments = [*good[:at], value, *good[at + 1 :]]
        with pytest.raises((ValueError, TypeError)):
            native.augment_batch(*arguments)
    with pytest.raises(ValueError, match="a kind of step"):
        plan(Step("turn", 0))
    for places in ([0, 2], [-1, 0], [0]):
        arguments = [*good, (0, 0, 0), np.array(places, np.int64)]
        with pytest.raises(ValueError, match="place"):
            native.augment_batch(*arguments)


def test_images_of_a_batch_given_one_by_one() -> None:
    flip, rows = native.AugmentPlan([Step("flip", 0, (0,))], 1), np.array([[1.0], [0.0]])
    out = np.zeros((3, 1, 1, 2), np.float32)
    batch = native.augment_batch(
        flip, rows, None, "float32", out, "float32", (1, 1, 2), np.array([2, 0], np.int64)
    )
    image = np.array([[[1.0, 2.0]]], np.float32)
    assert batch.change(0, image) == 0 and batch.change(1, image) == 0
    assert out[:, 0, 0].tolist() == [[1, 2], [0, 0], [2, 1]]
    for number, given_image in ((2, image), (-1, image), (0, image[:, :, :1]), (0, image.astype(np.float64))):
        with pytest.raises(ValueError, match=r"."):
            batch.change(number, given_image)


def test_images_that_are_mixed_are_not_given_one_by_one() -> None:
    mixing, images = native.AugmentPlan([Step("mix_up", 0)], 1), np.zeros((2, 1, 1, 2), np.float32)
    with pytest.raises(ValueError, match="at once"):
        native.augment_batch(mixing, np.zeros((2, 1)), None, "float32", images, "float32", (1, 1, 2))
    batch = native.augment_batch(mixing, np.zeros((2, 1)), images, "float32", images.copy(), "float32")
    with pytest.raises(ValueError, match="at once"):
        batch.change(0, images[0])
