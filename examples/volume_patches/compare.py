"""Label a volume with one net in both ways, as before.py and as after.py do; show the size of the swap.

    python examples/volume_patches/make_data.py FOLDER
    python examples/volume_patches/compare.py FOLDER_OR_URL [STEPS]

The net is trained by before.py.  FOLDER, or with a URL the current folder, then has both predictions.
"""

import difflib
import sys
from pathlib import Path

import after
import before
import numpy as np
import torch

HERE = Path(__file__).parent
MOST = 1e-5  # by which probabilities may differ


def main(folder: str, steps: int = 20) -> bool:
    torch.manual_seed(0)
    model = before.UNet().to("cuda" if torch.cuda.is_available() else "cpu")
    before.train(model, folder, steps)
    # With TF32 a GPU's sums would depend on how many patches a batch has.
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        found = [np.load(script.predict(model, folder)) for script in (before, after)]
    differ = np.abs(found[0] - found[1]).max()
    is_equal = np.allclose(*found, rtol=0, atol=MOST)
    print(f"{'equal' if is_equal else 'NOT equal'} predictions, which differ by {differ:.1e} at most")
    texts = [(HERE / f"{name}.py").read_text().splitlines() for name in ("before", "after")]
    lines = list(difflib.unified_diff(*texts, n=0))[2:]
    gone, new = (sum(line.startswith(sign) for line in lines) for sign in "-+")
    print(f"the swap: {gone} lines go, {new} lines come")
    return is_equal


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    sys.exit(0 if main(sys.argv[1], *map(int, sys.argv[2:])) else 1)
