"""Hugging Face's Trainer, which makes the loader itself."""

import sys

import torch
from datasets import load_dataset
from torchvision import transforms
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification  # becomes: from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification; from fastpipe.torch import accelerate_trainer

TRAIN = transforms.Compose(
    [
        transforms.RandomResizedCrop(224),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        transforms.Normalize((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    ]
)


def train_transforms(rows):
    rows["pixel_values"] = [TRAIN(image.convert("RGB")) for image in rows["image"]]
    return rows


def collate_fn(samples):
    pixel_values = torch.stack([sample["pixel_values"] for sample in samples])
    return {"pixel_values": pixel_values, "labels": torch.tensor([sample["label"] for sample in samples])}


def make_trainer(folder):
    dataset = load_dataset("imagefolder", data_files={"train": f"{folder}/**/*.jpg"}, split="train")
    config = ViTConfig(hidden_size=192, num_hidden_layers=2, num_attention_heads=3, intermediate_size=768)
    config.num_labels = dataset.features["label"].num_classes
    args = TrainingArguments(
        output_dir=f"{folder}-output",
        per_device_train_batch_size=64,
        num_train_epochs=1,
        remove_unused_columns=False,
        dataloader_num_workers=2,
        dataloader_persistent_workers=True,
        report_to="none",
    )
    model, train = ViTForImageClassification(config), dataset.with_transform(train_transforms)
    return Trainer(model, args, data_collator=collate_fn, train_dataset=train)  # becomes:     return accelerate_trainer(Trainer(model, args, data_collator=collate_fn, train_dataset=train))


def make_loader(folder):
    return make_trainer(folder).get_train_dataloader()


if __name__ == "__main__":
    make_trainer(sys.argv[1]).train()
