"""Serve made-up photographs from a bucket that answers as late as one elsewhere, and mount it.

    python examples/s3_imagenet/serve.py [--classes 120] [--per-class 8] [--delay-ms 30]

It prints what to give to before.py and after.py, and runs until Ctrl-C.  Only this machine can reach it, and
nothing of it stays.  The server is Ceph's: apt-get install radosgw ceph-mon ceph-osd ceph-common; or one that
$FASTPIPE_S3_ENDPOINT names, with your credentials in the environment, in which a new bucket stays.  It is
mounted by s3fs-fuse, if that can be: apt-get install s3fs fuse3.
"""

import argparse
import contextlib
import signal
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fastpipe.bench.synthetic import photo_tree

# The server of fastpipe's tests.
sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "support"))

from delay_proxy import Faults
from mounts import missing_for_mounts, s3fs_mount
from s3_server import S3, S3Missing


def fill(s3: S3, bucket: str, classes: int, per_class: int) -> int:
    """Put photographs there, each in several classes, as they take long to make; their number."""
    with tempfile.TemporaryDirectory(prefix="fastpipe-photos-") as folder:
        photos = photo_tree(Path(folder), classes=min(classes, 8), per_class=per_class)
        found = [path.read_bytes() for path in sorted(photos.rglob("*.jpg"))]
    keys = [f"train/n{label:08d}/{number:04d}.jpg" for label in range(classes) for number in range(per_class)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda at: s3.put(bucket, keys[at], found[at % len(found)]), range(len(keys))))
    return len(keys)


def serve(classes: int, per_class: int, delay_ms: float) -> None:
    with contextlib.ExitStack() as stack:
        s3 = stack.enter_context(S3())
        bucket = s3.bucket()
        count = fill(s3, bucket, classes, per_class)
        late = stack.enter_context(s3.proxy(Faults(delay_ms=delay_ms, jitter_ms=delay_ms / 3)))
        endpoint, key, secret = (late.options[name] for name in ("endpoint_url", "key", "secret"))
        print(f"{count} photographs in {classes} classes, {delay_ms:g} ms away", flush=True)
        missing = missing_for_mounts("s3fs")
        if missing:
            print(f"not mounted: {missing}")
        else:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fastpipe-bucket-")))
            stack.enter_context(s3fs_mount(endpoint, bucket, key, secret, folder))
            print(f"python examples/s3_imagenet/before.py {folder}/train")
        print(f"export AWS_ENDPOINT_URL={endpoint}")
        if s3.server is not None:  # else they are yours, and in your environment
            print(f"export AWS_ACCESS_KEY_ID={key} AWS_SECRET_ACCESS_KEY={secret}")
        print(f"python examples/s3_imagenet/after.py s3://{bucket}/train", flush=True)
        signal.pause()


def main(classes: int = 120, per_class: int = 8, delay_ms: float = 30) -> None:
    try:
        serve(classes, per_class, delay_ms)
    except S3Missing as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        print("closed")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--classes", type=int, default=120, help="(default: 120)")
    parser.add_argument("--per-class", type=int, default=8, help="(default: 8)")
    parser.add_argument("--delay-ms", type=float, default=30, help="before each answer (default: 30)")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: nothing is to stay mounted
    main(args.classes, args.per_class, args.delay_ms)
