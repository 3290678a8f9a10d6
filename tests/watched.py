"""A network that records its inputs, small data modules, and a trainer that stands for one of several ranks."""

import math

import pytorch_lightning as pl
import torch
from lightning_utilities.core.rank_zero import rank_zero_only
from pytorch_lightning.strategies import SingleDeviceStrategy
from torch import nn

from lit_knn.estimators import Estimator
from lit_knn.reference import ReferenceSet


class WatchedNet(nn.Module):
    """Outputs its parameter everywhere, through dropout, and records its calls as (z_scaled, noise label, output)."""

    def __init__(self, value=0.3, num_classes=0, dropout=0.0):
        super().__init__()
        self.value = nn.Parameter(torch.tensor(value))
        self.dropout = nn.Dropout(dropout)
        self.num_classes = num_classes
        self.calls = []
        self.labels = []

    def forward(self, z_scaled, noise_label, class_label=None, augment_label=None):
        output = self.dropout(self.value.expand_as(z_scaled))
        self.calls.append((z_scaled.detach(), noise_label.detach(), output.detach()))
        self.labels.append(class_label)
        return output


class OneBadItem(WatchedNet):
    """Its output for item 7 is not finite after its first `good` calls; the first call is its trial."""

    good = 4

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        bad = torch.zeros_like(output)
        if len(self.calls) > self.good:
            bad[7] = math.inf
        return output + bad


class Tripled(nn.Module):
    """u = 3z, so that du/dt along a velocity is three times that velocity."""

    augment_dim = 8  # those of the second time

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(3.0))

    def forward(self, z, noise_label, class_label=None, augment_label=None):
        return self.weight * z


class SixtyImages(pl.LightningDataModule):
    """Sixty images of 1x4x4 in two batches; training and validation see the same batches."""

    def __init__(self, batch_size=30):
        super().__init__()
        self.batch_size = batch_size
        self.x = torch.randn(60, 1, 4, 4, generator=torch.Generator().manual_seed(3)) * 0.5
        self.dataset, self.reference = self.x, ReferenceSet(self.x)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(self.dataset, batch_size=self.batch_size)

    val_dataloader = train_dataloader


# The command line finds classes by name: a second `Images` would be ambiguous in its tests.
Images = SixtyImages


class Labelled(Images):
    """These images, moved apart into three classes, in one batch; options choose which parts have labels."""

    def __init__(self, in_batches=True, in_reference=True, lowest=0, class_names=None):
        super().__init__(60)
        self.class_names, self.labels = class_names, lowest + torch.arange(60) % 3
        self.x = self.x + self.labels.reshape(-1, 1, 1, 1)
        self.reference = ReferenceSet(self.x, labels=self.labels if in_reference else None)
        self.dataset = list(zip(self.x, self.labels, strict=True)) if in_batches else self.x


class OneOfSeveral(SingleDeviceStrategy):
    """Tells the run that it is one rank of several, without the others; it exchanges nothing."""

    def __init__(self, rank, size):
        super().__init__(device="cpu")
        self.global_rank = rank
        self.world_size = size

    @property
    def is_global_zero(self):
        return self.global_rank == 0

    def setup_environment(self):
        super().setup_environment()
        rank_zero_only.rank = self.global_rank

    def teardown(self):
        super().teardown()
        rank_zero_only.rank = 0


def undone(call, sigma_data=0.5):
    """Undo c_in and c_noise of a call; return z and t in float64, t as (B, 1, 1, 1)."""
    z_scaled, noise, _ = call
    t = torch.exp(4 * noise.double()).reshape(-1, *[1] * (z_scaled.ndim - 1))
    return z_scaled.double() * (t**2 + sigma_data**2).sqrt(), t


def karras(levels, sigma_min, sigma_max, rho):
    """EDM's grid, Karras et al. 2022, Eq. 5: descending, float64."""
    place = torch.arange(levels, dtype=torch.float64) / (levels - 1)
    return (
        sigma_max ** (1 / rho) + place * (sigma_min ** (1 / rho) - sigma_max ** (1 / rho))
    ) ** rho


class Asked(Estimator):
    """Answers with draws from its generator, and records levels, labels and draws of its calls."""

    needs_reference = False
    deterministic = False
    takes_labels = True

    def __init__(self, num_classes=0):
        self.num_classes = num_classes
        self.levels, self.labels, self.drawn, self.points = [], [], [], []

    def _posterior_mean(self, z, t, x_source, generator, labels):
        self.labels.append(labels if labels is None else labels.tolist())
        self.levels.append(torch.as_tensor(t).flatten()[0].item())
        self.points.append(z)
        self.drawn.append(torch.randn(z.shape, generator=generator).to(z.dtype))
        return self.drawn[-1]


def heun_levels(levels):
    """The levels at which Heun's steps through descending levels are evaluated; the step to 0 has one."""
    levels = levels.tolist()
    return [level for i, t in enumerate(levels) for level in (t, *levels[i + 1 : i + 2])]
