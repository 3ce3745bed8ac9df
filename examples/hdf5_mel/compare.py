"""Evaluate one net in both ways, that of before.py and that of after.py, and show the size of the swap.

python examples/hdf5_mel/make_data.py FOLDER
python examples/hdf5_mel/compare.py FOLDER [EPOCHS]
"""

import difflib
import sys
from pathlib import Path

import after
import before
import torch

HERE = Path(__file__).parent


def main(folder: str, epochs: int = 2) -> bool:
    torch.manual_seed(0)
    model = before.small_net()
    before.train(model, f"{folder}/train.h5", epochs)
    found = [script.evaluate(model, f"{folder}/test.h5") for script in (before, after)]
    for name, (votes, words) in zip(("before.py", "after.py"), found, strict=True):
        right = sum(vote == word for vote, word in zip(votes, words, strict=True))
        print(f"{name}: {right} of {len(words)} files")
    print("the same votes" if found[0] == found[1] else "NOT the same votes")
    texts = [(HERE / f"{name}.py").read_text().splitlines() for name in ("before", "after")]
    lines = list(difflib.unified_diff(*texts, n=0))[2:]
    gone, new = (sum(line.startswith(sign) for line in lines) for sign in "-+")
    print(f"the swap: {gone} lines go, {new} lines come")
    return found[0] == found[1]


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    sys.exit(0 if main(sys.argv[1], *map(int, sys.argv[2:])) else 1)
