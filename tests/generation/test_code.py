"""Versions of code: which changes count, which do not, and equal ones in every process."""

from __future__ import annotations

import functools
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastpipe.generation.code import DigestError, changed, code_version, value_digest


@pytest.fixture
def module(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Imports a source as a module, which replaces the one that had the name before."""
    made = set()

    def load(source: str, name: str = "scenes") -> Any:
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(source))
        made.add(name)
        sys.modules.pop(name, None)
        patch.setattr(sys, "path", [str(tmp_path), *(one for one in sys.path if one != str(tmp_path))])
        sys.path_importer_cache.pop(str(tmp_path), None)
        for compiled in tmp_path.glob("__pycache__/*"):  # a source of the same size and second has another
            compiled.unlink()
        return __import__(name)

    with pytest.MonkeyPatch.context() as patch:
        yield load
    for name in made:
        sys.modules.pop(name, None)


def ran(source: str) -> dict[str, Any]:
    """What a source without a file defines."""
    space: dict[str, Any] = {"__name__": "scenes"}
    exec(compile(textwrap.dedent(source), "<no file>", "exec", dont_inherit=True), space)
    return space


def differ(one: str, other: str) -> bool:
    return code_version(ran(one)["f"]) != code_version(ran(other)["f"])


BASE = '''
    """Scenes."""
    import numpy as np

    RATE = 0.5

    class Actor:
        """Somebody."""

        height = 1.8

        def pose(self, t):
            return t * self.height

    def noise(x):
        """Adds noise."""
        return x + RATE

    def unused(x):
        return -x

    def make(index, rng=None, *, frames=250):
        actor = Actor()
        return [noise(actor.pose(t)) for t in range(frames)], np.zeros(3)
'''


def test_a_version_has_a_part_for_each_piece_of_code(module: Any) -> None:
    parts = code_version(module(BASE).make).parts
    assert {name: part.partition(":")[0] for name, part in parts.items()} == {
        "scenes:make": "function", "scenes:noise": "helper", "scenes:Actor": "class", "scenes:Actor.pose": "helper",
        "scenes:Actor.height": "constant", "scenes:RATE": "constant", "scenes:make[frames]": "value",
        "numpy": "package", "python": "package",
    }  # fmt: skip
    assert parts["numpy"] == f"package:{np.__version__}"
    assert parts["python"] == f"package:{sys.version_info.major}.{sys.version_info.minor}"


@pytest.mark.parametrize("load", ["module", "exec"])
@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"""Adds noise."""', '"""Adds other noise."""', ""), ('"""Somebody."""\n', "\n", ""),
        ("RATE = 0.5", "RATE = 0.5  # a comment\n\n\n", ""), ("return -x", "return +x", ""),
        ("return x + RATE", "return (x +\n                RATE)  # a comment", ""),
        ("return x + RATE", "return x - RATE", "helper 'scenes:noise' changed"),
        ("RATE = 0.5", "RATE = 0.25", "constant 'scenes:RATE' changed"),
        ("t * self.height", "t / self.height", "helper 'scenes:Actor.pose' changed"),
        ("height = 1.8", "height = 1.7", "constant 'scenes:Actor.height' changed"),
        ("frames=250", "frames=251", "value 'scenes:make[frames]' changed"),
        ("np.zeros(3)", "np.zeros(4)", "function 'scenes:make' changed"),
    ],
)  # fmt: skip
def test_a_change_that_counts_is_named(old: str, new: str, message: str, load: str, module: Any) -> None:
    def version(source: str) -> Any:
        return code_version(module(source).make if load == "module" else ran(source)["make"])

    one, other = version(BASE), version(BASE.replace(old, new))
    assert (one.digest == other.digest) == (not message) and old in BASE
    assert message in changed(one.parts, other.parts) if message else one == other


def test_new_and_removed_parts_and_other_packages_are_named() -> None:
    old = {"a:f": "function:1", "a:old": "helper:2", "numpy": "package:1.0"}
    new = {"a:f": "function:2", "a:New": "class:2", "numpy": "package:2.0"}
    assert changed(old, new) == [
        "function 'a:f' changed", "class 'a:New' is used now", "package 'numpy' is 2.0, was 1.0",
        "helper 'a:old' is not used any more",
    ]  # fmt: skip
    assert changed(new, new) == []


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("if x: return 1\n    return 2", "if x: return 2\n    return 1"),
        ("if x: a()\n    else: b()", "if x: b()\n    else: a()"),
        ("if x: a()\n    b()", "if x:\n        a()\n        b()"), ("if x: a()", "if not x: a()"),
        ("try: a()\n    except KeyError: b()", "try: a()\n    except ValueError: b()"),
        ("try:\n        a()\n        b()\n    except KeyError: c()", "try: a()\n    except KeyError: c()\n    b()"),
        ("try:\n        a()\n        b()\n    finally: c()", "a()\n    try: b()\n    finally: c()"),
        ("for i in x:\n        a(i)\n        b(i)", "for i in x:\n        a(i)\n    b(i)"),
        ("for i in x:\n        if i: break\n        a(i)", "for i in x:\n        if i: continue\n        a(i)"),
        ("while x: a()", "if x: a()"), ("with a():\n        b()\n        c()", "with a(): b()\n    c()"),
        ("return a() and (b() or c())", "return (a() and b()) or c()"),
        ("class A:\n        y = 1\n    return A.y", "class A:\n        y = 2\n    return A.y"),
    ],
    ids=lambda source: source.replace("\n", "; ")[:40],
)  # fmt: skip
def test_the_way_through_code_counts(one: str, other: str, module: Any) -> None:
    one, other = f"def f(x):\n    {one}", f"def f(x):\n    {other}"
    assert differ(one, other) and code_version(module(one).f) != code_version(module(other).f)


@pytest.mark.parametrize(
    "source",
    [
        "def make(n):\n    def g(x): return x * n + VALUE\n    return g\nf = make(2)",
        "def make(n):\n    return lambda x: x * n\nf = make(VALUE)",
        "import functools\ndef g(n, x): return n\nf = functools.partial(g, VALUE)",
        "def g(x): return x\ndef f(x): return x\nf.batch = lambda x: x * VALUE",
        "class A:\n    def __init__(self, n): self.n = n\n    def f(self, x): return self.n\nf = A(VALUE).f",
        "class A:\n    def __init__(self, n): self.n = n\n    def __call__(self, x): return self.n\nf = A(VALUE)",
        "class A:\n    def __call__(self, x): return VALUE\nf = A()",
        "class A:\n    @classmethod\n    def f(cls, x): return VALUE\nf = A.f",
        "class A:\n    @staticmethod\n    def g(x): return VALUE\ndef f(x): return A.g(x)",
        "class A:\n    @property\n    def g(self): return VALUE\ndef f(x): return A().g",
        "class B:\n    def g(self): return VALUE\nclass A(B): pass\ndef f(x): return A().g()",
        "class M(type):\n    def g(cls): return VALUE\nclass A(metaclass=M): pass\ndef f(x): return A.g()",
        "import functools\n@functools.cache\ndef g(x): return VALUE\ndef f(x): return g(x)",
        "def g(x): return VALUE\nTABLE = {'a': [g]}\ndef f(x): return TABLE['a'][0](x)",
        "def f(x, y=VALUE): return y", "def f(x, *, y=VALUE): return y",
        "def g(x): return h(x)\ndef h(x): return g(x) + VALUE\ndef f(x): return g(f(x))",
        "import functools\ndef deco(g):\n    @functools.wraps(g)\n    def w(*a): return g(*a) + VALUE\n    return w\n"
        "@deco\ndef f(x): return x",
        "import functools\ndef deco(g):\n    @functools.wraps(g)\n    def w(*a): return g(*a)\n    return w\n"
        "@deco\ndef f(x): return VALUE",
        "from dataclasses import dataclass\n@dataclass\nclass C:\n    n: int = VALUE\ndef f(x): return C().n",
        "import enum\nclass E(enum.Enum):\n    A = VALUE\ndef f(x): return E.A",
        "from typing import NamedTuple\nclass C(NamedTuple):\n    n: int = VALUE\ndef f(x): return C().n",
        "import numpy as np\nN = np.arange(3) + VALUE\ndef f(x): return N",
        "class C:\n    pass\nCONFIG = C()\nCONFIG.lr = VALUE\ndef f(x): return CONFIG.lr",
        "import pydantic\nclass C(pydantic.BaseModel):\n    n: int = VALUE\ndef f(x): return C().n",
        "import attr\n@attr.define\nclass C:\n    n: int = VALUE\ndef f(x): return C().n",
        "import numba\n@numba.njit\ndef g(x): return VALUE\ndef f(x): return g(x)",
        "import torch\n@torch.no_grad()\ndef g(x): return VALUE\ndef f(x): return g(x)",
    ],
    ids=lambda source: source.replace("\n", "; ")[:70],
)  # fmt: skip
def test_what_a_function_uses_is_followed(source: str) -> None:
    package = source.removeprefix("import ").partition("\n")[0]
    if package in ("pydantic", "attr", "numba", "torch"):
        pytest.importorskip(package, reason=f"needs {package}: pip install {package}")
    one, same, other = (f"VALUE = {value}\n{source}" for value in (1, 1, 2))
    assert not differ(one, same), "though objects have other addresses"
    assert differ(one, other)


def test_modules_of_the_user_are_followed(module: Any, tmp_path: Path) -> None:
    """By attributes where they were imported before, by their sources where a function imports them."""
    module("RATE = 1\ndef noise(x): return x * RATE\ndef other(x): return x", "low")
    source = "import low\nimport low as other\ndef make(x): return low.noise(x)"
    parts = code_version(module(source).make).parts
    assert set(parts) == {"scenes:make", "low:noise", "low:RATE", "python"}
    module("RATE = 2\ndef noise(x): return x * RATE", "low")
    assert changed(parts, code_version(module(source).make).parts) == ["constant 'low:RATE' changed"]

    del sys.modules["low"]
    (tmp_path / "deep.py").write_text("RATE = 1")
    (tmp_path / "low.py").write_text("import deep, json, numpy  # and more\ndef noise(x): return deep.RATE")
    source = "def make(x):\n    import low\n    return low.noise(x)"
    parts = code_version(module(source).make).parts
    assert set(parts) == {"scenes:make", "low", "deep", "numpy", "python"}
    assert "low" not in sys.modules, "nothing is imported for it"
    module((tmp_path / "low.py").read_text(), "low")
    assert code_version(module(source).make).parts == parts, "whether it is imported makes no difference"
    for same in ('"""Doc."""\nRATE = 1', "RATE = (1)  # a comment"):
        module(same, "deep")
        assert code_version(module(source).make).parts == parts
    module("RATE = 2", "deep")
    assert changed(parts, code_version(module(source).make).parts) == ["module 'deep' changed"]


def test_relative_imports_of_a_package_are_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    source = "def f(x):\n    from . import low\n    from .low import g\n    return g(x)"
    for name, text in (("__init__", ""), ("low", "def g(x): return x"), ("top", source)):
        (tmp_path / "mine" / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        assert {"mine.top:f", "mine.low"} <= set(code_version(__import__("mine.top").top.f).parts)
    finally:
        for name in ("mine", "mine.low", "mine.top"):
            sys.modules.pop(name, None)


def test_packages_count_by_their_versions() -> None:
    source = "from numpy.linalg import norm\nfrom numpy import dot, float32\ndef f(x): return norm(dot(x, x), float32)"
    assert code_version(ran(source)["f"]).parts["numpy"] == f"package:{np.__version__}"
    other = "import sklearn.ensemble\ndef f(x): return sklearn.ensemble.RandomForestClassifier()"
    pytest.importorskip("sklearn", reason="needs scikit-learn: pip install scikit-learn")
    assert code_version(ran(other)["f"]).parts["sklearn"].startswith("package:scikit-learn ")


def test_arguments_of_a_packages_decorator_count(module: Any, tmp_path: Path) -> None:
    """They are in the source alone, unless that was edited since the import."""
    source = "import functools\n@functools.lru_cache(1)\ndef g(x): return x\ndef make(x): return g(x)"
    other = source.replace("(1)", "(2)")
    one, again, changed_one = (code_version(module(text).make) for text in (source, source, other))
    assert one == again != changed_one
    edited = []
    for text in (source.replace("return x", "return -x"), other.replace("return x", "return -x")):
        made = module(source)
        (tmp_path / "scenes.py").write_text(text)
        edited.append(code_version(made.make))
    assert edited[0] == edited[1], "as neither is the source of what runs"


def test_a_file_that_is_edited_after_its_import_does_not_count(module: Any, tmp_path: Path) -> None:
    file, no_python = tmp_path / "scenes.py", "something else = it is no Python"
    made = module(BASE)
    before = code_version(made.make)
    file.write_text(textwrap.dedent(BASE).replace("x + RATE", "x - RATE"))
    assert code_version(made.make) == before
    fresh = module(BASE.replace("range(frames)", "range(frames + 1)"))
    file.write_text(no_python)
    assert code_version(fresh.make).digest != before.digest
    made = module("def outer():\n    def make(x): return x\n    return make")
    before = code_version(made.outer())
    file.write_text(no_python)
    assert code_version(made.outer()) == before, "a function that is made after the edit"


def test_code_that_a_tool_puts_into_the_same_function_counts(module: Any) -> None:
    made = module("def g(x): return x\ndef make(x): return g(x)")
    before = code_version(made.make)
    made.g.__code__ = (lambda x: x + 1).__code__  # as IPython's autoreload does
    assert changed(before.parts, code_version(made.make).parts) == ["helper 'scenes:g' changed"]


def test_the_folder_of_memoize_and_variables_that_functions_assign_do_not_count(module: Any) -> None:
    source = "from fastpipe import memoize\n@memoize(dir='one')\ndef make(x): return x"
    one, other = (module(text).make.__wrapped__ for text in (source, source.replace("one", "two")))
    assert code_version(one) == code_version(other)
    source = "count = 0\ndef f(x):\n    global count\n    count += 1\n    return g(x)\ndef g(x): return count"
    space = ran(source)
    before = code_version(space["f"])
    space["f"](1)
    assert space["count"] == 1 and code_version(space["f"]) == before


def test_a_value_without_a_digest_counts_by_its_type() -> None:
    source = "import threading\nlock = threading.Lock()\ndef f(x): return lock"
    assert not differ(source, source)
    assert differ(source, source.replace("Lock()", "Event()"))


def test_two_functions_of_one_name_are_two_parts() -> None:
    source = "def make(n):\n    return lambda x: x + n\none, two = make(1), make(N)\ndef f(x): return one(x) + two(x)"
    first, second = (code_version(ran(source.replace("N", n))["f"]) for n in "23")
    assert (
        len([name for name in first.parts if "lambda" in name]) == 4
    )  # two functions, and the value of each
    assert first.digest != second.digest


def test_anything_that_can_be_called_has_a_version() -> None:
    for fn in (len, np.sin, np.linalg.norm, str.upper, functools.partial(len), threading.Lock, "".join, dict):
        assert len(code_version(fn).digest) == 64
    assert code_version(len).digest != code_version(abs).digest


def digest(value: object) -> str:
    return value_digest(value, lambda thing: thing.__qualname__)


class _Plain:
    def __init__(self, **values: Any) -> None:
        vars(self).update(values)


def _tree(*names: str) -> _Plain:
    root = _Plain(name="root", below=set())
    root.below |= {_Plain(name=name, above=root) for name in names}
    return root


def test_an_object_that_many_others_refer_to_is_read_once() -> None:
    class Counted:
        reads = 0

        def __getstate__(self) -> int:
            Counted.reads += 1
            return 1

    value: list[Any] = [Counted()]
    for _ in range(50):  # else 2**50 times
        value = [value, value]
    digest([value, {1: value}, {_Plain(a=value)}])
    assert Counted.reads == 1


def test_equal_values_have_the_same_digest() -> None:
    one, shared = (1, 2), "ab"
    cycle: list[Any] = [1]
    again: list[Any] = [1]
    for each in (cycle, again):
        each.append(each)
    assert digest([one, one]) == digest([one, tuple(n for n in one)])
    assert digest([shared, shared]) == digest([shared, "".join(["a", "b"])])
    assert digest({1, "a", None}) == digest({None, "a", 1})
    assert digest(_Plain(a=1, b=2)) == digest(_Plain(b=2, a=1))
    assert digest(cycle) == digest(again) != digest([1, [1, [1]]])
    assert digest(_tree("a", "b")) == digest(_tree("a", "".join(["b"]))) != digest(_tree("a", "c"))
    assert digest(np.arange(6).reshape(2, 3).T) == digest(np.ascontiguousarray(np.arange(6).reshape(2, 3).T))
    padded = np.zeros(2, np.dtype([("a", "i1"), ("b", "f8")], align=True))
    noisy = np.frombuffer(bytes(range(32)), padded.dtype).copy()
    noisy["a"], noisy["b"] = 0, 0.0
    assert digest(padded) == digest(noisy)


@pytest.mark.parametrize(
    "values",
    [
        (1, 1.0, True, "1", b"1", None, np.int64(1), np.float64(1), np.int32(1), 1 + 0j, [1], (1,), {1}),
        (0.0, -0.0, float("nan"), float("inf")),
        ([], (), {}, set(), frozenset(), "", b""),
        ([1, [2]], [[1], 2], [1, 2], [[1, 2]]),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, {"a": 2, "b": 1}),
        (np.zeros(2), np.zeros((2, 1)), np.zeros(2, "f4"), np.zeros(2, ">f8"), np.zeros(2, "M8[s]"), np.zeros(0)),
        (np.array(["a", None], object), np.array(["a", "b"], object), np.array(["a", "b"])),
        (_Plain(a=1), _Plain(a=2), _Plain()),
        (slice(1), slice(2), range(2), range(3)),
        (functools.partial(len), functools.partial(abs), functools.partial(abs, 1)),
    ],
)  # fmt: skip
def test_other_values_have_other_digests(values: tuple[Any, ...]) -> None:
    assert len({digest(value) for value in values}) == len(values)


def test_tables_and_tensors_count_by_their_values() -> None:
    pandas = pytest.importorskip("pandas", reason="needs pandas: pip install pandas")
    torch = pytest.importorskip("torch", reason="needs torch: pip install '.[torch]'")
    table = pandas.DataFrame({"a": [1, 2, 3], "b": ["x", "y", "z"], "c": pandas.Categorical(["u", "v", "u"])})
    assert digest(table) == digest(table[table["a"] > 0]) == digest(table.copy())
    others = [table.assign(a=[1, 2, 4]), table.rename(columns={"a": "d"}), table.set_index("a"), table[["b", "a", "c"]],
              table.assign(a=[1.0, 2.0, 3.0]), table.assign(c=table["c"].cat.add_categories("w")), table["a"]]  # fmt: skip
    assert len({digest(one) for one in (table, *others)}) == 1 + len(others)
    tensor = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    assert digest(tensor.T) == digest(tensor.T.contiguous())
    others = [tensor, tensor.float(), tensor + 1, tensor.T, torch.nn.Parameter(tensor), torch.zeros(0)]
    assert len({digest(one) for one in others}) == len(others)
    with pytest.raises(DigestError, match="dense"):
        digest(torch.zeros(2).to_sparse())


def test_a_value_that_cannot_be_compared_has_no_digest() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for value in (threading.Lock(), (x for x in ()), deep, _Plain(a=sys._getframe())):
        with pytest.raises(DigestError):
            digest(value)
    while deep:  # freed level by level
        deep = deep[0]
