"""Modules that imports, datasets and commands load, and errors about missing packages."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from PIL import Image
from scripts import ran

from fastpipe.bench.synthetic import write_zarr
from fastpipe.cli import COMMANDS


def _python(code: str) -> str:
    done = ran("-c", code)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _loaded_by(code: str) -> set[str]:
    """Return the names of all modules that a process has loaded after this code."""
    printed = _python(f"{code}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))")
    return set(json.loads(printed.splitlines()[-1]))


def _packages(modules: set[str]) -> set[str]:
    return {name.split(".")[0] for name in modules}


def test_importing_fastpipe_loads_only_numpy_and_the_standard_library() -> None:
    ours = _loaded_by("import fastpipe") - _loaded_by("import numpy")
    assert _packages(ours) - set(sys.stdlib_module_names) == {"fastpipe", "numpy"}


def test_augmenting_images_loads_no_volumes_no_motion_and_no_compiler() -> None:
    loaded = _loaded_by("""
import torch
from fastpipe import augment
views = augment.Compose([augment.RandomResizedCrop(8), augment.RandAugment(), augment.ToDtype()])
views(torch.zeros(2, 3, 9, 9, dtype=torch.uint8))
augment.SpecAugment(1, 2, 1, 2)(torch.ones(2, 4, 5))
""")
    parts = {".".join(name.split(".")[:3]) for name in loaded}
    assert "fastpipe.augment.chains" in parts
    assert not parts & {"fastpipe.augment.volumes", "fastpipe.augment.motion", "torch._dynamo"}


def test_the_image_folder_and_the_loader_load_at_most_80_modules() -> None:
    loaded = _loaded_by("from fastpipe import FastImageFolder, FastLoader")
    ours = {name for name in loaded if "fastpipe." in name}
    assert len(ours) <= 80
    parts = {".".join(name.split(".")[1:3]) for name in ours}
    assert not _packages(parts) & {"augment", "tf", "bench", "volumes", "tools", "generation"}
    assert not parts & {"torch.array_dataset", "torch.hdf5_dataset", "torch.patch_dataset", "torch.staging"}


@pytest.mark.few(4)
@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_the_help_of_a_command_loads_no_framework(command: str) -> None:
    loaded = _loaded_by(f"""
import contextlib, io
from fastpipe.cli import main
with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
    main({[*command.split(), "--help"]!r})
""")
    assert not _packages(loaded) & {"torch", "torchvision", "PIL", "matplotlib", "tensorflow"}
    if not command:
        assert sum(name.split(".")[0] == "fastpipe" for name in loaded) <= 25


def test_a_worker_of_generate_loads_no_framework() -> None:
    assert not _packages(_loaded_by("from fastpipe.generation.workers import serve")) & {
        "torch", "torchvision", "PIL", "matplotlib", "tensorflow", "h5py", "rich", "joblib", "cloudpickle",
        "threadpoolctl",
    }  # fmt: skip


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["images", "hdf5", "patches"])
def test_a_dataset_loads_only_the_packages_of_its_format(kind: str, tmp_path: Path) -> None:
    if kind == "images":
        (tmp_path / "a").mkdir()
        for number in range(2):
            Image.new("RGB", (8, 8)).save(tmp_path / "a" / f"{number}.png")
        dataset = f"fastpipe.FastImageFolder({str(tmp_path)!r}, lambda image: image.height)"
    elif kind == "hdf5":
        with h5py.File(tmp_path / "rows.h5", "w") as file:
            file.create_dataset("x", data=np.arange(32.0).reshape(8, 4), chunks=(2, 4), compression="gzip")
        dataset = f"fastpipe.FastHDF5Dataset({str(tmp_path / 'rows.h5')!r}, 'x')"
    else:
        write_zarr(tmp_path / "x.zarr", [np.zeros((8, 8), np.uint16)], (8, 8), (4, 4))
        dataset = f"fastpipe.FastPatchDataset({str(tmp_path / 'x.zarr')!r}, (4, 4))"
    loaded = _loaded_by(f"""
import fastpipe
loader = fastpipe.FastLoader({dataset}, 2, True)
assert len(next(iter(loader))) == 2 and loader.plan
assert "FastHDF5Dataset" in dir(fastpipe.torch)
""")
    assert not loaded & ({"h5py", "fastpipe.hdf5"} if kind == "images" else {"torchvision", "PIL"})


_READER = "__import__('fastpipe.images.reader').images.reader.ImageReader(fastpipe.Decode())"
_PROBE = "fastpipe.generation.probe(lambda index, rng: index, 9, workers=1)"


@pytest.mark.few(3)
@pytest.mark.parametrize(("missing", "use", "extra"), [
    ("torch", "fastpipe.FastImageFolder", "torch"), ("torchvision", "fastpipe.FastImageFolder", "torch"),
    ("PIL", _READER, "image"),
    *((package, _PROBE, "generation") for package in ("h5py", "threadpoolctl", "cloudpickle")),
])  # fmt: skip
def test_the_error_for_a_missing_package_has_the_pip_command(missing: str, use: str, extra: str) -> None:
    code = f"""
import sys

class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == {missing!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Hide())
import fastpipe
try:
    {use}
except fastpipe.errors.MissingDependencyError as error:
    print(error)
"""
    assert f"pip install '.[{extra}]'" in _python(code)


def test_images_are_decoded_without_any_other_decoder(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for number in range(4):
        Image.new("RGB", (40, 30), "teal").save(tmp_path / "a" / f"{number}.jpg")
    code = f"""
import json, sys
for name in ("simplejpeg", "nvidia", "nvidia.nvimgcodec"):
    sys.modules[name] = None
from torchvision import transforms
import fastpipe
transform = transforms.Compose([transforms.RandomResizedCrop(8), transforms.ToTensor()])
dataset = fastpipe.FastImageFolder({str(tmp_path)!r}, transform)
shapes = [list(images.shape) for images, _ in fastpipe.FastLoader(dataset, batch_size=2)]
print(json.dumps([shapes, list(dataset[0][0].shape)]))
"""
    assert json.loads(_python(code)) == [[[2, 3, 8, 8]] * 2, [3, 8, 8]]


@pytest.mark.parametrize(("content", "expected"), [
    ("import something_else.inside", "MissingDependencyError pip install something_else"),
    ("import broken_package.gone", "ModuleNotFoundError"),
    ("import numpy; numpy.gone", "ImportError"),
    ("raise OSError('lib.so: cannot open shared object file')", "OSError"),
    ("raise ImportError('lib.so: undefined symbol')", "ImportError"),
])  # fmt: skip
def test_an_installed_package_that_fails_raises_its_own_error(
    tmp_path: Path, content: str, expected: str
) -> None:
    (tmp_path / "broken_package").mkdir()
    (tmp_path / "broken_package" / "__init__.py").write_text(content)
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
from fastpipe.core.extras import require
try:
    require("broken_package", extra="image")
except Exception as error:
    print(type(error).__name__, "pip" + str(error).partition("pip")[2] if "pip" in str(error) else "")
"""
    assert _python(code).strip() == expected


@pytest.mark.slow
@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="run it on Linux: it makes one look like Windows"
)
def test_without_file_locks_everything_can_be_imported_and_the_cache_is_off() -> None:
    """As on Windows, of which this takes away what fastpipe's cache is made of."""
    code = """
import logging, os, sys, tempfile
import platformdirs, threadpoolctl, torch, torchvision, multiprocessing.util
from pathlib import Path

sys.modules["fcntl"] = sys.modules["resource"] = None
for name in ("register_at_fork", "memfd_create", "preadv", "pread", "pwrite", "O_NOFOLLOW", "O_DIRECTORY",
             "O_CLOEXEC", "fork", "geteuid", "getuid"):
    if hasattr(os, name):
        delattr(os, name)
find = threadpoolctl.ThreadpoolController._find_libraries_with_dl_iterate_phdr
threadpoolctl.ThreadpoolController._find_libraries_on_windows = find  # this system's, not Windows's
sys.platform = "win32"
logging.basicConfig(stream=sys.stdout, format="%(message)s")
import fastpipe
from fastpipe import Cache, FastImageFolder, FastLoader
sys.platform = "linux"  # other packages' libraries are those of this system
from PIL import Image
with tempfile.TemporaryDirectory() as folder:
    (Path(folder) / "a").mkdir()
    Image.new("RGB", (9, 9)).save(Path(folder) / "a" / "x.png")
    assert FastImageFolder(folder)[0]
    for where in ("ram", "disk", "ram"):
        assert FastImageFolder(folder, cache=where)[0]
    try:
        FastImageFolder(folder, cache=Cache("disk", dir=folder))
    except fastpipe.errors.CacheError:
        print("an error")
"""
    expected = ["decoded images are not kept: on this operating system the cache is off"] * 2 + ["an error"]
    assert _python(code).splitlines() == expected


def _error_with(folder: Path, package: str, content: str, code: str) -> str:
    """The last line that Python prints where a package is this file."""
    (folder / f"{package}.py").write_text(content)
    done = ran("-c", f"import sys; sys.path.insert(0, {str(folder)!r}); {code}")
    assert done.returncode, done.stdout
    return done.stderr.splitlines()[-1]


@pytest.mark.few(3)
@pytest.mark.parametrize("access", [
    "from fastpipe import {name}", "import fastpipe; hasattr(fastpipe, '{name}')",
    "import fastpipe; getattr(fastpipe, '{name}', None)", "from fastpipe.{part} import {inner}",
])  # fmt: skip
@pytest.mark.parametrize(("package", "name", "part", "inner"), [
    ("torch", "FastLoader", "torch", "FastLoader"), ("torchvision", "FastImageFolder", "torch", "FastImageFolder"),
    ("tensorflow", "tf", "tf", "image_dataset"), ("rich", "generate", "generation", "generate"),
    ("torch", "accelerate", "augment", "ColorJitter"),
])  # fmt: skip
def test_every_access_shows_the_error_within_a_package(
    tmp_path: Path, package: str, name: str, part: str, inner: str, access: str
) -> None:
    code = access.format(name=name, part=part, inner=inner)
    content = "import sys\nsys.no_such_thing\n"  # an AttributeError, by which a name seems to be missing
    error = _error_with(tmp_path, package, content, code)
    assert error.startswith("ImportError: ")
    assert error.endswith("cannot be imported: module 'sys' has no attribute 'no_such_thing'")


@pytest.mark.parametrize(
    "error", ["ImportError: libfoo.so: cannot open", "OSError: no device", "RuntimeError: no driver"]
)
def test_other_errors_of_a_package_are_raised_unchanged(tmp_path: Path, error: str) -> None:
    kind, text = error.split(": ", 1)
    assert (
        _error_with(tmp_path, "torch", f"raise {kind}({text!r})", "from fastpipe import FastLoader") == error
    )


@pytest.mark.parametrize(("package", "name"), [("torch", "FastLoader"), ("torchvision", "FastImageFolder")])
def test_a_file_that_hides_a_package_is_named(tmp_path: Path, package: str, name: str) -> None:
    error = _error_with(tmp_path, package, "", f"from fastpipe import {name}")
    place = f"({package} is {tmp_path / package}.py: if that is a file of your own"
    assert f"'{package}' is not a package {place}" in error


def test_an_attribute_that_an_old_package_lacks_is_named_with_its_file(tmp_path: Path) -> None:
    error = _error_with(tmp_path, "torch", "import json; json.new_thing", "from fastpipe import FastLoader")
    assert "module 'json' has no attribute 'new_thing' (json is " in error
