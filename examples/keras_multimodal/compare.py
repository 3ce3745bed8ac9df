"""Train in both ways, that of before.py and that of after.py, from several seeds: how well, and how long?

python examples/keras_multimodal/make_data.py FOLDER
python examples/keras_multimodal/compare.py FOLDER [EPOCHS [SEEDS]]

Of six epochs from three seeds, as by default, before.py takes more than half an hour on two cores.
"""

import re
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent


def run(name: str, folder: str, epochs: int, seed: int) -> tuple[float, float]:
    """Accuracy and seconds of a script, in a process of its own: none finds what another has prepared."""
    shutil.rmtree(Path(folder, "kept"), ignore_errors=True)
    command = [sys.executable, str(HERE / name), folder, str(epochs), str(seed)]
    begin = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    seconds = time.perf_counter() - begin
    [accuracy] = re.findall(r"^accuracy ([\d.]+)%", done.stdout, re.MULTILINE)
    print(f"{name} from seed {seed}: {accuracy}%, {seconds:.0f} s", flush=True)
    return float(accuracy), seconds


def main(folder: str, epochs: int = 6, seeds: int = 3) -> dict[str, list[tuple[float, float]]]:
    names = ("before.py", "after.py")
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for seed in range(seeds):
        for name in names:
            found[name].append(run(name, folder, epochs, seed))
    means = {}
    for name in names:
        accuracies, seconds = zip(*found[name], strict=True)
        means[name] = statistics.mean(seconds)
        told = ", ".join(f"{value:.1f}%" for value in accuracies)
        print(f"{name}: {told}; mean {statistics.mean(accuracies):.1f}%; {means[name]:.0f} s each")
    print(f"before.py takes {means['before.py'] / means['after.py']:.1f} times as long")
    return found


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3, 4):
        sys.exit(__doc__)
    main(sys.argv[1], *map(int, sys.argv[2:]))
