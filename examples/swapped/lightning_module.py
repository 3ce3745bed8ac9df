"""A LightningModule and a LightningDataModule."""

import sys
from pathlib import Path

import lightning
import torch
from PIL import Image
from torch.utils.data import DataLoader  # becomes: from fastpipe import FastLoader as DataLoader
from torch.utils.data import Dataset, random_split
from torchvision import models, transforms

TRAIN = transforms.Compose(
    [
        transforms.RandomResizedCrop(224),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    ]
)


class Photos(Dataset):
    def __init__(self, folder):
        self.paths = sorted(Path(folder).rglob("*.jpg"))
        self.classes = sorted({path.parent.name for path in self.paths})

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        path = self.paths[index]
        return TRAIN(Image.open(path).convert("RGB")), self.classes.index(path.parent.name)


class PhotoModule(lightning.LightningDataModule):
    def __init__(self, folder, batch_size=64):
        super().__init__()
        self.folder, self.batch_size = folder, batch_size

    def setup(self, stage):
        self.train, self.val = random_split(Photos(self.folder), [0.8, 0.2], torch.Generator().manual_seed(42))

    def train_dataloader(self):
        return DataLoader(
            self.train, batch_size=self.batch_size, shuffle=True, num_workers=2, persistent_workers=True
        )


class Classifier(lightning.LightningModule):
    def __init__(self, lr=0.05):
        super().__init__()
        self.model, self.lr = models.squeezenet1_1(), lr

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = torch.nn.functional.cross_entropy(self.model(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


def make_loader(folder):
    """Return the loader that the trainer iterates over.  The trainer requests it, and makes no step."""
    trainer = lightning.Trainer(
        max_steps=0, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Classifier(), PhotoModule(folder))
    return trainer.train_dataloader


if __name__ == "__main__":
    lightning.Trainer(max_epochs=1).fit(Classifier(), PhotoModule(sys.argv[1]))
