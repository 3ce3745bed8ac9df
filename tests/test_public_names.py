"""The public surface: names, documentation, options, errors."""

from __future__ import annotations

import inspect
import pkgutil
from typing import Any

import pytest

import fastpipe
from fastpipe import BadSamples, Decode, errors, generation


def test_the_public_names_are_these() -> None:
    assert fastpipe.__all__ == [
        "BadSamples", "Cache", "Decode", "FastHDF5Dataset", "FastImageFolder", "FastLoader",
        "FastPatchDataset", "Rescale", "Shard", "Shuffle", "Stage", "Subset", "ZScore", "accelerate",
        "autotune", "autotune_batch_size", "errors", "generate", "group_batches", "memoize", "profile",
        "sampling", "segment_reduce", "stitch", "watch",
    ]  # fmt: skip
    assert set(fastpipe.__all__) <= set(dir(fastpipe))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="FastThing"):
        fastpipe.FastThing


@pytest.mark.parametrize("name", fastpipe.__all__)
def test_every_public_name_is_documented(name: str) -> None:
    thing = getattr(fastpipe, name)
    assert inspect.getdoc(thing)
    if inspect.isclass(thing):
        for method, value in vars(thing).items():
            if not method.startswith("_") and (inspect.isfunction(value) or isinstance(value, property)):
                assert inspect.getdoc(value), f"{name}.{method}"


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_is_one_of_fastpipes(name: str) -> None:
    assert issubclass(getattr(errors, name), errors.FastpipeError)


def test_options_show_what_differs_from_the_defaults() -> None:
    assert (repr(Decode()), repr(Decode(exif=True))) == ("Decode()", "Decode(exif=True)")
    assert repr(BadSamples("skip", max_errors=3)) == "BadSamples(policy='skip', max_errors=3)"
    assert BadSamples.of("skip") == BadSamples("skip")


@pytest.mark.parametrize(("option", "given"), [
    *((Decode, given) for given in (
        {"backend": "cv2"}, {"max_pixels": 0}, {"max_pixels": "many"}, {"short_side": True}, {"short_side": 25.5},
        {"gpu_share": 1.5}, {"gpu_share": float("nan")}, {"gpu_share": "half"},
        {"backend": "nvimgcodec", "gpu_share": True},
    )),
    *((BadSamples, {"policy": "skip", "max_errors": most}) for most in (-1, "few")),
    (BadSamples, {"policy": "ignore"}), (BadSamples.of, {"value": "ignore"}),
])  # fmt: skip
def test_options_that_cannot_work_are_refused(option: Any, given: dict[str, Any]) -> None:
    with pytest.raises(errors.OptionError, match="got"):
        option(**given)


@pytest.mark.parametrize("backend", ["pillow", "simplejpeg"])
def test_a_decoder_of_the_cpus_has_no_share_on_a_gpu(backend: Any) -> None:
    with pytest.raises(errors.OptionError, match=f"'{backend}' does not: name 'nvimgcodec' or 'dali'"):
        Decode(backend, gpu_share=0.5)


def test_a_module_that_was_loaded_before_is_in_no_functions_place() -> None:
    for module in pkgutil.iter_modules(generation.__path__):
        assert module.name not in generation.__all__
