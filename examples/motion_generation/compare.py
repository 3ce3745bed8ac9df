"""Generate and train in both ways, that of before.py and that of after.py, and show the size of the swap.

    python examples/motion_generation/compare.py FOLDER [SAMPLES [EPOCHS [SEEDS]]]

Each script runs SEEDS times, in a process and a part of FOLDER of its own, which is removed: none finds what
another has made.
"""

import difflib
import inspect
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from actor import get_poses

HERE = Path(__file__).parent
GENERATED = r"^generated \d+ scenes in ([\d.]+) s: .*, ([\d,]+) bytes$"


def run(name: str, folder: str, samples: int, epochs: int, seed: int) -> tuple[float, int, float]:
    """Return a script's seconds of generation, bytes stored for training, and accuracy in percent."""
    with tempfile.TemporaryDirectory(dir=folder) as own:
        command = [sys.executable, str(HERE / name), own, *map(str, (samples, epochs, seed))]
        text = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    [(seconds, size)] = re.findall(GENERATED, text, re.MULTILINE)
    [accuracy] = re.findall(r"^accuracy ([\d.]+)%$", text, re.MULTILINE)
    print(f"{name} from seed {seed}: {seconds} s, {size} bytes, {accuracy}%", flush=True)
    return float(seconds), int(size.replace(",", "")), float(accuracy)


def main(folder: str, samples: int = 300, epochs: int = 5, seeds: int = 3) -> dict[str, list[tuple]]:
    os.makedirs(folder, exist_ok=True)
    found: dict[str, list[tuple]] = {"before.py": [], "after.py": []}
    for seed in range(seeds):
        for name, runs in found.items():
            runs.append(run(name, folder, samples, epochs, seed))
    for name, runs in found.items():
        seconds, sizes, accuracies = map(statistics.mean, zip(*runs, strict=True))
        print(
            f"{name}: {samples} scenes generated in {seconds:.1f} s, {seconds / samples * 1000:.1f} ms each; "
            f"{sizes / 1e6:,.1f} MB stored; right about {accuracies:.1f}%"
        )
    texts = [(HERE / name).read_text().splitlines() for name in found]
    lines = list(difflib.unified_diff(*texts, n=0))[2:]
    gone, new = (sum(line.startswith(sign) for line in lines) for sign in "-+")
    also = len(inspect.getsource(get_poses).splitlines())
    print(f"the swap: {gone} lines go, {new} lines come, and the {also} of get_poses in actor.py")
    return found


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3, 4, 5):
        sys.exit(__doc__)
    main(sys.argv[1], *map(int, sys.argv[2:]))
