"""Compare the predictions of ``fastpipe profile`` with the script after its first advice was followed.

::

    python benchmarks/predictions.py --mri FOLDER --rounds 3 --json predictions.json

Of four examples the data are made, and in each round ``before.py`` is profiled, and then the script in which
its first advice is followed: ``after.py``, or one of the two with a line changed, where that does more than
the advice says.  A gain is the time of a step as it is over that with the change.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from rounds import save_facts

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


class Case(NamedTuple):
    """An example.

    Attributes:
        name: of its folder.
        advice: how the advice begins that is followed.
        script: in which it is, and what is replaced there: a pattern, and by what.
        data, arguments: for ``make_data.py``; for the scripts, after the folder.
        times: that its table has each row, so that an epoch is longer than what is made ahead.
        options: of ``fastpipe profile`` for ``before.py``.
    """

    name: str
    advice: str
    script: str = "after.py"
    replaced: tuple[str, str] = ("", "")
    data: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    times: int = 1


_READ_BY_PIL = r"(?s)    made = tf\.data\.Dataset\.from_tensor_slices.*?    return made\.batch.*?\n"
_READ_BY_FASTPIPE = """    from fastpipe.tf import Modality, image_dataset
    made = image_dataset(
        table, "label", batch_size=BATCH, image_size=SIDE, shuffle=seed is not None, seed=seed,
        drop_remainder=seed is not None, tabular={"tabular": TABULAR + FORESTS}, cache="off",
        modalities={name: Modality(folder=f"{folder}/{name}", boxes=edges(name)) for name in names},
    )
    if seed is not None:
        made = made.unbatch().map(augment, num_parallel_calls=tf.data.AUTOTUNE)
        made = made.batch(BATCH, drop_remainder=True)
    return made.prefetch(tf.data.AUTOTUNE)
"""
_LOSS = "loss = torch.nn.functional.cross_entropy("
CASES = [
    # after.py augments in the net and keeps images as well, which the advice does not say.
    Case(
        "keras_multimodal", "read images by fastpipe", "before.py", (_READ_BY_PIL, _READ_BY_FASTPIPE),
        data=("288",), times=4,
    ),
    Case("hdf5_mel", "read rows by fastpipe", arguments=("20",)),
    Case("volume_patches", "read patches by fastpipe", arguments=("400",)),
    Case(
        "imagefolder_resnet", "mixed precision", "before.py",
        (re.escape(_LOSS), f'with torch.autocast("cpu", dtype=torch.bfloat16): {_LOSS}'), arguments=("300",),
        options=("--limit", "300", "--try"),
    ),
]  # fmt: skip


def profiled(script: Path, data: Path, case: Case, *options: str) -> dict[str, Any]:
    """The report of a script."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, "-m", "fastpipe", "profile", *options, "--json", file.name]
        done = subprocess.run(
            [*command, str(script), str(data), *case.arguments], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} {script}: {done.stderr[-2000:]}")
        found: dict[str, Any] = json.loads(Path(file.name).read_text())
    return found


def changed(case: Case, folder: Path) -> Path:
    """A copy of the example in which the advice is followed; its script."""
    copy = folder / f"{case.name}-changed"
    shutil.copytree(EXAMPLES / case.name, copy)
    script = copy / case.script
    text = script.read_text()
    pattern, new = case.replaced
    text, count = re.subn(pattern, lambda found: new, text, count=1)
    if not count:
        raise SystemExit(f"{script} has nothing like {pattern!r} to be replaced")
    script.write_text(text)
    return script


def measured(case: Case, folder: Path, rounds: int) -> dict[str, Any]:
    """Rounds of an example."""
    data = folder / case.name
    subprocess.run(
        [sys.executable, str(EXAMPLES / case.name / "make_data.py"), str(data), *case.data],
        check=True, capture_output=True,
    )  # fmt: skip
    if case.times > 1:
        names, *rows = (data / "table.csv").read_text().splitlines()
        (data / "table.csv").write_text("\n".join([names, *rows * case.times, ""]))
    script, found = changed(case, folder), []
    for _ in range(rounds):
        before = profiled(EXAMPLES / case.name / "before.py", data, case, *case.options)
        after = profiled(script, data, case)
        told = [one for one in before["advice"] if one["what"].startswith(case.advice)]
        found.append({
            "before_s": before["step_s"], "after_s": after["step_s"], "seconds": before["seconds"],
            "is_first": bool(told) and told[0] == before["advice"][0],
            "predicted_s": told[0]["predicted_s"] if told else None,
        })  # fmt: skip
    return {"example": case.name, "advice": case.advice, "rounds": found}


def row(case: dict[str, Any]) -> str:
    """A line of the table: medians, and the range of predicted over measured gain."""
    rounds = [one for one in case["rounds"] if one["predicted_s"]]
    if not rounds:
        before = statistics.median(one["before_s"] for one in case["rounds"])
        return f"| {case['example']} | {before * 1e3:,.1f} ms | | | | never advised: {case['advice']} |"
    before, predicted, after = (
        statistics.median(one[name] for one in rounds) for name in ("before_s", "predicted_s", "after_s")
    )
    ratios = [one["after_s"] / one["predicted_s"] for one in rounds]
    first = sum(one["is_first"] for one in case["rounds"])
    return (
        f"| {case['example']} | {before * 1e3:,.1f} ms "
        f"| {predicted * 1e3:,.1f} ms, {before / predicted:.2f}× | "
        f"{after * 1e3:,.1f} ms, {before / after:.2f}× | {statistics.median(ratios) - 1:+.0%} "
        f"({min(ratios) - 1:+.0%} to {max(ratios) - 1:+.0%}) | first in {first} of {len(case['rounds'])} |"
    )


def main() -> None:
    """Measure, print a table, and write everything as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3, help="of each example (default: 3)")
    parser.add_argument("--mri", help="folder of a head's volumes, for volume_patches (default: made ones)")
    parser.add_argument("--only", choices=[case.name for case in CASES], help="one example")
    parser.add_argument("--json", type=Path, help="where to write everything")
    args = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory() as name:
        for case in CASES:
            if args.only in (None, case.name):
                if case.name == "volume_patches" and args.mri:
                    case = case._replace(data=("--mri", args.mri))
                found.append(measured(case, Path(name), args.rounds))
                print(row(found[-1]), flush=True)
    save_facts(args.json, None, {"cases": found})


if __name__ == "__main__":
    main()
