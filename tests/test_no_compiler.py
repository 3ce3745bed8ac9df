"""Where there is no compiler, and nothing can be kept: everything works, and nothing is compiled or written."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import fastpipe


def _files() -> set[Path]:
    """Those of the package but for compiled Python, which other tests may write meanwhile."""
    return {path for path in Path(fastpipe.__file__).parent.rglob("*") if path.suffix != ".pyc"}


@pytest.mark.few(1)
@pytest.mark.parametrize("what", ["torch", "tf"])
def test_everything_works_without_a_compiler_and_without_a_folder_for_caches(
    what: str, tmp_path: Path
) -> None:
    if what == "tf" and importlib.util.find_spec("tensorflow") is None:
        pytest.skip("needs TensorFlow")
    (tmp_path / "empty").mkdir()
    (tmp_path / "temporary").mkdir()
    (tmp_path / "file").touch()  # nobody can make a folder below it, root included
    kept = ("LD_", "LC_", "LANG", "ASAN")
    environment = {name: value for name, value in os.environ.items() if name.startswith(kept)} | {
        "PATH": f"{tmp_path}/empty", "HOME": f"{tmp_path}/file/home", "XDG_CACHE_HOME": f"{tmp_path}/file/cache",
        "TMPDIR": f"{tmp_path}/temporary", "CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_HOME": f"{tmp_path}/temporary/keras",  # else Keras takes /tmp
    }  # fmt: skip
    before, child = _files(), Path(__file__).parent / "support" / "everything_once.py"
    command = [sys.executable, str(child), what, str(tmp_path)]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["loaded"] == []
    for module, package in told["skipped"].items():
        assert importlib.util.find_spec(package.split(".")[0]) is None, (module, package)
    assert _files() == before
    assert not [path for path in tmp_path.rglob("*") if path.suffix in (".nbi", ".nbc")]
