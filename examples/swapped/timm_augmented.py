"""timm's own loader, with RandAugment and random erasing."""

import sys

import timm.data


def make_loader(folder):
    dataset = timm.data.create_dataset("", root=folder)
    loader = timm.data.create_loader(
        dataset,
        input_size=(3, 224, 224),
        batch_size=64,
        is_training=True,
        auto_augment="rand-m9-inc1",
        interpolation="bicubic",
        re_prob=0.25,
        num_workers=2,
        use_prefetcher=False,
    )
    return loader  # becomes:     import fastpipe; return fastpipe.accelerate(loader)


if __name__ == "__main__":
    print(sum(len(labels) for _, labels in make_loader(sys.argv[1])), "images")
