"""timm's own loader, with RandAugment and random erasing."""

import sys

from timm.data import create_dataset, create_loader  # becomes: from timm.data import create_dataset, create_loader; from fastpipe import accelerate


def timms_loader(folder):
    return create_loader(
        create_dataset("", root=folder),
        input_size=(3, 224, 224),
        batch_size=64,
        is_training=True,
        auto_augment="rand-m9-inc1",
        interpolation="bicubic",
        re_prob=0.25,
        num_workers=2,
        use_prefetcher=False,
    )


def make_loader(folder):
    return timms_loader(folder)  # becomes:     return accelerate(timms_loader(folder))


if __name__ == "__main__":
    print(sum(len(labels) for _, labels in make_loader(sys.argv[1])), "images")
