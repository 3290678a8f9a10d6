"""A data module of three classes, and a network that records its inputs, for tests of training with labels."""

import pytorch_lightning as pl
import torch
from torch import nn

from lit_knn.reference import ReferenceSet


class Watched(nn.Module):
    """Outputs its parameter everywhere and records its inputs."""

    def __init__(self, num_classes=3):
        super().__init__()
        self.value = nn.Parameter(torch.tensor(0.3))
        self.num_classes = num_classes
        self.calls = []

    def forward(self, z_scaled, noise_label, class_label=None, augment_label=None):
        self.calls.append((z_scaled.detach(), noise_label.detach(), class_label))
        return self.value.expand_as(z_scaled)


class Labelled(pl.LightningDataModule):
    """Sixty images of 1x4x4 in three classes; each batch has all of them; options choose which parts have labels."""

    def __init__(self, in_batches=True, in_reference=True, lowest=0, class_names=None):
        super().__init__()
        self.class_names = class_names
        generator = torch.Generator().manual_seed(3)
        self.labels = lowest + torch.randint(3, (60,), generator=generator)
        self.x = torch.randn(60, 1, 4, 4, generator=generator) * 0.5 + self.labels.reshape(-1, 1, 1, 1)
        self.reference = ReferenceSet(self.x, labels=self.labels if in_reference else None)
        self.dataset = list(zip(self.x, self.labels, strict=True)) if in_batches else self.x

    def train_dataloader(self):
        return torch.utils.data.DataLoader(self.dataset, batch_size=60)

    val_dataloader = train_dataloader


def undone(call):
    """Recover z and its noise level, (B,) float64, from the network's inputs."""
    z_scaled, noise, _ = call
    t = torch.exp(4 * noise.double())
    return z_scaled.double() * (t.reshape(-1, 1, 1, 1) ** 2 + 0.25).sqrt(), t
