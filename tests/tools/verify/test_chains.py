"""``--transform``: named chains, and the user's own code."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fastpipe.errors import OptionError
from fastpipe.tools.comparison import NAMED, chain_of

CODE = """
from functools import partial
import torch
from torchvision import transforms
from torchvision.transforms import v2

ready = transforms.Compose([transforms.Resize(32), transforms.CenterCrop(32), transforms.ToTensor()])
module = v2.Compose([v2.Resize(32), v2.CenterCrop(32), v2.ToImage()])

def make():
    return ready

def make_sized(side=32):
    return transforms.CenterCrop(side)

def make_nothing():
    return None

def breaks():
    raise KeyError("size")

def plain(image):
    return image.rotate(90)

rotate = partial(plain)

class Own:
    size = 7

    def __call__(self, image):
        return image

class Needs:
    def __init__(self, size):
        pass

    def __call__(self, image):
        return image

number = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of the user's, in the present folder."""
    (tmp_path / "my_transforms.py").write_text(CODE)
    (tmp_path / "my_broken.py").write_text("import no_such_package_at_all")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("my_transforms", "my_broken"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return "my_transforms"


@pytest.mark.parametrize("name", NAMED)
def test_named_chains(name: str) -> None:
    chain = chain_of(name)
    assert callable(chain.transform)
    assert (chain.name, chain.is_own) == (name, False)


@pytest.mark.parametrize(
    ("attribute", "kind"),
    [
        ("ready", "Compose"),
        ("module", "Compose"),
        ("make", "Compose"),
        ("make_sized", "CenterCrop"),
        ("plain", "function"),
        ("rotate", "partial"),
        ("Own", "Own"),
        ("transforms.ToTensor", "ToTensor"),
    ],
)
def test_a_transform_or_what_makes_one(module: str, attribute: str, kind: str) -> None:
    chain = chain_of(f"{module}:{attribute}")
    assert type(chain.transform).__name__ == kind
    assert chain.is_own
    assert len(chain.about) <= 200


@pytest.mark.parametrize(
    ("attribute", "words"),
    [
        ("none", "'my_transforms' has no 'none'"),
        ("Own.none", "has no 'Own.none'"),
        ("number", "is a int; name a transform"),
        ("Needs", "class that needs arguments"),
        ("make_nothing", "is a NoneType"),
        ("breaks", "calling it failed: KeyError: 'size'"),
    ],
)
def test_what_is_no_transform(module: str, attribute: str, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        chain_of(f"{module}:{attribute}")


@pytest.mark.parametrize("name", ["evaluation", "", ":", "module:", ":name"])
def test_names_that_say_nothing(name: str) -> None:
    with pytest.raises(OptionError, match="must be eval, train, none or module:name"):
        chain_of(name)


def test_a_module_that_is_not_there_or_fails(module: str) -> None:
    with pytest.raises(OptionError, match="importing 'no_such_module' failed: ModuleNotFoundError"):
        chain_of("no_such_module:name")
    with pytest.raises(OptionError, match="No module named 'no_such_package_at_all'"):
        chain_of("my_broken:name")
