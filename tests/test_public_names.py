"""The public surface: names, documentation, options, errors."""

from __future__ import annotations

import inspect
import pickle
import pkgutil
from typing import Any

import pytest

import fastpipe
from fastpipe import BadSamples, Decode, errors, generation


def test_the_public_names_are_these() -> None:
    assert fastpipe.__all__ == [
        "BadSamples", "Cache", "Decode", "FastHDF5Dataset", "FastImageFolder", "FastLoader",
        "FastPatchDataset", "Shard", "Shuffle", "Stage", "Subset", "accelerate", "autotune",
        "autotune_batch_size", "errors", "generate", "group_batches", "memoize", "profile", "sampling",
        "segment_reduce", "stitch", "watch",
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
def test_every_error_is_one_of_fastpipes_and_survives_pickling(name: str) -> None:
    kind = getattr(errors, name)
    assert issubclass(kind, errors.FastpipeError)
    again = pickle.loads(pickle.dumps(kind("what, where, remedy")))
    assert type(again) is kind
    assert str(again) == "what, where, remedy"


def test_a_bad_samples_error_keeps_path_and_index() -> None:
    error = pickle.loads(pickle.dumps(errors.BadSampleError("text", path="a.jpg", index=3)))
    assert (error.path, error.index, str(error)) == ("a.jpg", 3, "text")
    assert isinstance(error, OSError)


def test_options_show_what_differs_from_the_defaults() -> None:
    assert repr(Decode()) == "Decode()"
    assert repr(Decode(exif=True)) == "Decode(exif=True)"
    assert repr(BadSamples("skip", max_errors=3)) == "BadSamples(policy='skip', max_errors=3)"
    assert BadSamples.of("skip") == BadSamples("skip")


@pytest.mark.parametrize(
    "option",
    [Decode(), Decode("pillow", exif=True, max_pixels=9), BadSamples(), BadSamples("skip", "bad.jsonl", 3)],
    ids=repr,
)
def test_options_survive_pickling(option: object) -> None:
    again = pickle.loads(pickle.dumps(option))
    assert again == option
    assert repr(again) == repr(option)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Decode(backend="cv2"),  # type: ignore[arg-type]
        lambda: Decode(max_pixels=0),
        lambda: Decode(max_pixels="many"),  # type: ignore[arg-type]
        lambda: Decode(short_side=True),
        lambda: Decode(short_side=25.5),  # type: ignore[arg-type]
        lambda: Decode(gpu_share=1.5),
        lambda: Decode(gpu_share=float("nan")),
        lambda: Decode(gpu_share="half"),  # type: ignore[arg-type]
        lambda: Decode("nvimgcodec", gpu_share=True),
        lambda: BadSamples("ignore"),  # type: ignore[arg-type]
        lambda: BadSamples("skip", max_errors=-1),
        lambda: BadSamples("skip", max_errors="few"),  # type: ignore[arg-type]
        lambda: BadSamples.of("ignore"),
    ],
)
def test_options_that_cannot_work_are_refused(make: object) -> None:
    with pytest.raises(errors.OptionError, match="got"):
        make()  # type: ignore[operator]


@pytest.mark.parametrize("backend", ["pillow", "simplejpeg"])
def test_a_decoder_of_the_cpus_has_no_share_on_a_gpu(backend: Any) -> None:
    with pytest.raises(errors.OptionError, match=f"'{backend}' does not: name 'nvimgcodec' or 'dali'"):
        Decode(backend, gpu_share=0.5)


def test_a_module_that_was_loaded_before_is_in_no_functions_place() -> None:
    for module in pkgutil.iter_modules(generation.__path__):
        assert module.name not in generation.__all__
