"""``memoize``: which calls load a result, which compute it and why, and which wait for another."""

from __future__ import annotations

import functools
import inspect
import itertools
import os
import pickle
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripts import ran

from fastpipe import memoize
from fastpipe.errors import CacheError, OptionError


class Trace:
    """Counts calls in a file, where counting does not change the code."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def note(self) -> int:
        with open(self.path, "a") as file:
            return file.write("x")

    def count(self) -> int:
        return len(self.path.read_text()) if self.path.exists() else 0


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    return Trace(tmp_path / "trace")


def _ran(source: str, **more: Any) -> dict[str, Any]:
    space: dict[str, Any] = {"__name__": "scenes", **more}
    exec(compile(source, "<no file>", "exec", dont_inherit=True), space)
    return space


def _files(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_the_second_call_loads_the_result(folder: Path, trace: Trace, said: Any) -> None:
    def train(x: int) -> Any:
        trace.note()
        return {"weights": np.arange(x), "loss": 0.5}

    kept = memoize(train, dir=folder)
    one, again = kept(3), kept(3)
    assert trace.count() == 1
    assert one["loss"] == again["loss"] and np.array_equal(one["weights"], again["weights"])
    (name,) = _files(folder)
    computed, loaded = said()
    assert computed.endswith("train: computed: no entry yet")
    assert f"train: loaded from {name}, which saves 0." in loaded


def test_arguments_count_by_name_not_by_how_they_are_given(folder: Path, trace: Trace) -> None:
    @memoize(dir=folder)
    def f(a: Any, b: Any = 2, *rest: Any, c: Any = 3, **more: Any) -> Any:
        trace.note()
        return [a, b, list(rest), c, more]

    assert f(1) == f(a=1) == f(1, 2) == f(b=2, a=1) == f(1, c=3) == [1, 2, [], 3, {}]
    assert trace.count() == 1
    assert f(1, x=1, y=2) == f(1, y=2, x=1)
    assert trace.count() == 2
    assert f(1, 2, 4) == [1, 2, [4], 3, {}]
    assert f(1.0) == [1.0, 2, [], 3, {}]
    assert trace.count() == 4


def test_a_memoized_function_looks_like_the_function(folder: Path) -> None:
    def f(a: int, *, b: int = 2) -> int:
        """Adds."""
        return a + b

    kept = memoize(f, dir=folder)
    assert (kept.__name__, kept.__doc__, inspect.signature(kept)) == ("f", "Adds.", inspect.signature(f))
    assert repr(kept).startswith("<memoized ") and repr(kept).endswith(f"f in {str(folder)!r}>")
    assert not folder.exists(), "it is made by the first call"
    for wrong in (lambda: kept(), lambda: kept(1, d=2)):  # type: ignore[call-arg]
        with pytest.raises(TypeError, match=r"f\(\)"):
            wrong()
    assert kept.clear() == 0


def test_an_error_is_not_kept(folder: Path, trace: Trace) -> None:
    @memoize(dir=folder)
    def f(x: int) -> int:
        trace.note()
        raise KeyError(x)

    for _ in range(2):
        with pytest.raises(KeyError):
            f(1)
    assert trace.count() == 2 and _files(folder) == []


def test_the_object_of_a_method_is_an_argument(folder: Path, trace: Trace) -> None:
    class Model:
        def __init__(self, rate: Any) -> None:
            self.rate = rate

        @memoize(dir=folder)
        def fit(self, x: int) -> float:
            trace.note()
            return self.rate * x  # type: ignore[no-any-return]

        def __call__(self, x: int) -> float:
            trace.note()
            return self.rate + x  # type: ignore[no-any-return]

    assert Model(2.0).fit(3) == Model(2.0).fit(x=3) == 6.0
    assert trace.count() == 1
    assert Model(3.0).fit(3) == 9.0
    for rate, calls in ((2.0, 4), (2.0, 4), (3.0, 6)):
        assert memoize(Model(rate), dir=folder)(1) == rate + 1
        assert memoize(functools.partial(Model.__call__, Model(rate)), dir=folder / "partial")(1) == rate + 1
        assert trace.count() == calls
    locked = Model(threading.Lock())
    for fn in (locked.__call__, locked, functools.partial(divmod, locked)):
        with pytest.raises(OptionError, match=r"argument '(self|functools.partial)'"):
            memoize(fn, dir=folder)(1)


def test_an_argument_that_cannot_be_compared_is_an_error_that_names_it(folder: Path, trace: Trace) -> None:
    @memoize(dir=folder)
    def f(x: Any, file: Any = None) -> int:
        return trace.note()

    with pytest.raises(OptionError, match=r"argument 'file' of .*_io.TextIOWrapper: pass what it is made"):
        f(1, sys.__stdout__)
    with pytest.raises(OptionError, match="argument 'x'"):
        f({"deep": [threading.Lock()]})
    assert trace.count() == 0
    for function, calls in ((lambda x: x + 1, 1), (lambda x: x + 1, 1), (lambda x: x + 2, 2)):
        f(function)
        assert trace.count() == calls, "functions count by their code"


def test_entries_are_of_one_function(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    space = _ran("def f(x): return 'f'\ndef g(x): return 'g'")
    f, g = (memoize(space[name], dir=folder) for name in "fg")
    assert (f(1), g(1), f(1), g(1)) == ("f", "g", "f", "g")
    assert f.clear() == 1
    assert len(_files(folder)) == 1 and _files(folder)[0].startswith("g-")
    assert (memoize(space["f"], dir=folder / "other")(1), g(1)) == ("f", "g")
    monkeypatch.chdir(tmp_path)
    relative = memoize(space["f"], dir="relative")
    monkeypatch.chdir("/")
    assert relative(1) == "f" and len(_files(tmp_path / "relative")) == 1


@memoize(dir="never-made")
def _at_the_top(x: int) -> int:
    return x


def test_a_memoized_function_can_be_pickled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = memoize(os.path.basename, dir=folder, pickle=True)
    kept = pickle.loads(pickle.dumps(made))
    assert repr(kept) == repr(made) and kept("a/b") == "b"
    here = sys.modules.get(__name__, inspect.getmodule(test_a_memoized_function_can_be_pickled))
    monkeypatch.setitem(sys.modules, __name__, here)
    monkeypatch.setattr(here, "_at_the_top", _at_the_top, raising=False)
    assert pickle.loads(pickle.dumps(_at_the_top)) is _at_the_top
    # Where one is unpickled, the name in the package is still the function's, and not a module's.
    code = f"import pickle; pickle.loads({pickle.dumps(kept)!r}); from fastpipe import memoize; memoize(len, dir='x')"
    assert ran("-c", code).returncode == 0


def test_a_function_may_call_itself(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "@memoize(dir=folder)\ndef fib(n):\n    return n if n < 2 else fib(n - 1) + fib(n - 2)"
    assert _ran(source, memoize=memoize, folder=folder)["fib"](20) == 6765
    assert len(_files(folder)) == 21
    source = "import os\n@memoize(dir=folder)\ndef f(n): return f(n) + 1 if os.environ.pop('ONCE', '') else n"
    monkeypatch.setenv("ONCE", "yes")
    assert _ran(source, memoize=memoize, folder=folder)["f"](5) == 6, "the same call inside itself"


def test_a_function_whose_result_cannot_be_kept_is_refused_at_once(folder: Path) -> None:
    space = _ran("def generator(): yield\nasync def coroutine(): ...\nasync def both(): yield")
    for fn in (space["generator"], space["coroutine"], space["both"], dict.update, 3):
        with pytest.raises(OptionError, match="memoize"):
            memoize(fn, dir=folder)


def test_the_reason_is_another_argument(folder: Path, said: Any) -> None:
    kept = memoize(lambda data, epochs, rate=0.1: epochs, dir=folder)
    for call in (lambda: kept(np.zeros(3), 1), lambda: kept(np.zeros(3), 2),
                 lambda: kept(np.ones(3), 3, rate=0.1), lambda: kept(np.ones(3), 2)):  # fmt: skip
        call()
    nearest = "another value of {} than in the nearest entry"
    assert [message.split(": computed: ")[1] for message in said()] == [
        "no entry yet", nearest.format("'epochs'"), nearest.format("'data', 'epochs'"), nearest.format("'epochs'"),
    ]  # fmt: skip


def test_the_reason_is_the_code(folder: Path, said: Any) -> None:
    source = 'def noise(x): return x + 1\ndef train(epochs):\n    """Trains."""\n    return noise(epochs)\n'

    def call(source: str) -> str:
        assert memoize(_ran(source)["train"], dir=folder)(3) in (4, 5)
        return said()[-1].partition(": ")[2]  # type: ignore[no-any-return]

    assert call(source) == "computed: no entry yet"
    assert call(source.replace("Trains", "Still trains")).startswith("loaded")
    assert call(source.replace("+ 1", "+ 2")) == "computed: the code changed: helper 'scenes:noise' changed"
    assert "; constant 'scenes:RATE' is used now" in call(source.replace("+ 1", "+ RATE") + "RATE = 1\n")
    assert call(source).startswith("loaded"), "what was kept before is there"


def test_the_reason_is_a_file(folder: Path, tmp_path: Path, said: Any) -> None:
    data = tmp_path / "data" / "deep"
    data.mkdir(parents=True)
    (data / "a.txt").write_text("a")
    kept = memoize(lambda folder, scale=1: scale, dir=folder)

    def call(path: Any, *args: int) -> str:
        kept(path, *args)
        return said()[-1].partition(": ")[2]  # type: ignore[no-any-return]

    for path in (data.parent, str(data.parent)):
        call(path)
        assert call(path).startswith("loaded")
        for change in (
            lambda: (data / "a.txt").write_text("longer"),
            lambda: (data / "b.txt").write_text("b"),
            lambda: os.chmod(data / "b.txt", 0o640),
            lambda: (data / "b.txt").rename(data / "c.txt"),
        ):
            change()
            assert call(path) == "computed: the files of 'folder' changed"
            assert call(path).startswith("loaded")
        (data / "c.txt").unlink()
        assert call(path).startswith("loaded"), "it is as it was"
    assert call(str(data.parent), 2) == "computed: another value of 'scale' than in the nearest entry"
    assert call(data / "a.txt") == "computed: another value of 'folder' than in the nearest entry"


@pytest.mark.parametrize("kind", [str, Path])
def test_files_at_any_depth_of_an_argument_count(kind: Any, folder: Path, tmp_path: Path) -> None:
    file, new = tmp_path / "file.csv", tmp_path / "new.csv"
    changes: Any = (
        (lambda: file.write_text("1"), 1), (lambda: None, 1), (lambda: file.write_text("12"), 2),
        (lambda: (new.write_text("12"), new.replace(file)), 3),  # of the same size and time, in another file
        (file.unlink, 4),
    )  # fmt: skip
    wraps = (lambda x: x, lambda x: [1, (x,)], lambda x: {"a": {"b": [x]}}, lambda x: {x})
    for number, wrap in enumerate(wraps):
        trace = Trace(tmp_path / f"trace {number}")
        kept = memoize(lambda table, trace=trace: trace.note(), dir=folder / str(number))
        for change, calls in changes:
            change()
            kept(wrap(kind(file)))
            assert trace.count() == calls


def test_links_in_a_folder_are_followed_once(folder: Path, tmp_path: Path, trace: Trace) -> None:
    data, elsewhere = tmp_path / "data", tmp_path / "elsewhere"
    for place in (data, elsewhere):
        place.mkdir()
    (elsewhere / "x").write_text("x")
    (data / "more").symlink_to(elsewhere)
    (data / "around").symlink_to(data)
    (data / "nowhere").symlink_to(tmp_path / "missing")
    # The kept results in the folder do not count as its data.
    kept = memoize(lambda folder: trace.note(), dir=data / "kept")
    kept(data)
    kept(data)
    assert trace.count() == 1
    (elsewhere / "x").write_text("longer")
    kept(data)
    assert trace.count() == 2


def test_strings_that_only_look_like_paths_are_strings(folder: Path, trace: Trace) -> None:
    kept = memoize(lambda text: trace.note(), dir=folder)
    for text in (".", "/", "..", "", "\0", "x" * 100_000, "\ud800"):
        kept(text)
        kept(text)
    assert trace.count() == 7


def test_pickle_keeps_any_result(folder: Path, trace: Trace, said: Any) -> None:
    def f() -> Any:
        trace.note()
        return {"weights": np.arange(5), "model": [range(3)]}

    plain, kept = memoize(f, dir=folder), memoize(f, dir=folder, pickle=True)
    assert plain()["model"] == [range(3)] and _files(folder) == []
    message = said()[1]
    assert "is returned but not kept: it['model'][0] is a builtins.range. Return arrays" in message
    assert message.endswith("or pass pickle=True")
    made, again = kept(), kept()
    assert trace.count() == 2
    assert made["model"] == again["model"] and np.array_equal(made["weights"], again["weights"])
    again["weights"][0] = 3
    said()
    plain()
    assert trace.count() == 3
    messages = said()
    assert "it is pickled: pass pickle=True to load it; it stays where it is" in messages[0]
    assert messages[1].endswith("computed: its entry cannot be loaded")
    assert kept()["model"] == [range(3)] and trace.count() == 3
    assert memoize(lambda: [lambda: 1], dir=folder, pickle=True)()[0]() == 1
    assert "not kept: it cannot be pickled" in said()[-1]


def test_a_folder_of_others_is_refused(folder: Path, trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir()
    os.chmod(folder, 0o755)
    kept = memoize(trace.note, dir=folder)
    with pytest.raises(CacheError, match="chmod 700"):
        kept()
    os.chmod(folder, 0o700)
    (folder.parent / "link").symlink_to(folder)
    with pytest.raises(CacheError, match="cannot be used"):
        memoize(trace.note, dir=folder.parent / "link")()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(CacheError, match="belongs to user"):
        kept()
    assert trace.count() == 0, "before hours have passed"


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_no_other_user_reads_results_whatever_the_umask(umask: int, folder: Path) -> None:
    before = os.umask(umask)
    try:
        assert memoize(lambda: range(3), dir=folder, pickle=True)() == range(3)
    finally:
        os.umask(before)
    assert os.stat(folder).st_mode & 0o777 == 0o700
    key = Path(os.environ["XDG_CONFIG_HOME"], "fastpipe", "memoize.key")
    for file in (*folder.iterdir(), key):
        assert os.stat(file).st_mode & 0o777 == 0o600
    assert key.stat().st_size == 32


_SCRIPT = '''
"""A script."""
import functools
import numpy as np
import fastpipe
import helpers

TABLE = {"a": 1, 2: {"x", 3, None}, "f": helpers.noise}

class Actor:
    names = {"one", "two", "three"}
    def pose(self): return helpers.noise(1)

def deco(fn):
    @functools.wraps(fn)
    def wrapper(*args, **more): return fn(*args, **more)
    return wrapper

@fastpipe.memoize(dir="../kept")
@deco
def train(table, scale=(1, "x"), rng=np.arange(3), fold=None):
    import late
    with open("../trace", "a") as file:
        file.write("x")
    used = [lambda x: x + TABLE[2] for _ in Actor.names], Actor().pose(), helpers.RATE, __name__, __file__
    return {"weights": helpers.noise(table) * scale[0], "fold": fold}

def main():
    found = train(np.arange(3.0), fold={"a", "b", "c"})
    print(found["weights"].tolist(), sorted(found["fold"]))

if __name__ == "__main__":
    main()
'''


def test_the_next_run_loads_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However it is started, and from wherever: until the code is another."""
    for place in ("one", "two"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "script.py").write_text(_SCRIPT if place == "one" else "# moved\n" + _SCRIPT)
        (tmp_path / place / "helpers.py").write_text("RATE = 0.1\ndef noise(x): return x + 1")
        (tmp_path / place / "late.py").write_text("x = 1")

    seeds = itertools.count(1)

    def run(place: str, *arguments: object) -> str:
        monkeypatch.setenv("PYTHONHASHSEED", str(next(seeds)))
        done = ran(*arguments, cwd=tmp_path / place)
        assert done.returncode == 0, done.stderr
        return done.stdout

    for place, *arguments in (
        ("one", "script.py"), ("one", "-m", "script"), ("one", "-c", "import script; script.main()"),
        ("two", tmp_path / "two" / "script.py"),
    ):  # fmt: skip
        assert run(place, *arguments) == "[1.0, 2.0, 3.0] ['a', 'b', 'c']\n"
    assert (tmp_path / "trace").read_text() == "x"
    for file, text in (("helpers", "RATE = 0.1\ndef noise(x): return x + 2  # another"), ("late", "x = 2")):
        (tmp_path / "one" / f"{file}.py").write_text(text)
        assert run("one", "script.py").startswith("[2.0")
    assert (tmp_path / "trace").read_text() == "xxx" and len(_files(tmp_path / "kept")) == 3


@pytest.mark.parametrize("arguments", [[1] * 8, [0, 1]], ids=["the same", "others"])
def test_threads_wait_for_the_same_call_only(folder: Path, trace: Trace, arguments: list[int]) -> None:
    class Gate:  # its state does not count
        begun, all_begun = threading.Semaphore(0), threading.Event()

        def __reduce__(self) -> Any:
            return Gate, ()

        def wait(self) -> int:
            self.begun.release()
            self.all_begun.wait()
            return trace.note()

    gate = Gate()
    kept = memoize(lambda x: gate.wait() + x, dir=folder)
    with ThreadPoolExecutor(len(arguments)) as pool:
        found = pool.map(kept, arguments)
        for _ in set(arguments):  # different calls do not wait for each other
            gate.begun.acquire()
        gate.all_begun.set()
        assert list(found) == [x + 1 for x in arguments]
    assert trace.count() == len(set(arguments))
    assert [name for name in _files(folder) if name.endswith(".lock")] == []
