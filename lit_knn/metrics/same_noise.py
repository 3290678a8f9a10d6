"""Samples of estimators and networks from the same noise, and measures of how like they are."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from lit_knn.common.distributed import in_every_process, on_first_rank, own_batches
from lit_knn.common.progress import Bar, progress_bar
from lit_knn.common.rng import Stream, keyed_generator
from lit_knn.common.settings import describe, fingerprint
from lit_knn.estimators import Estimator
from lit_knn.metrics.estimator_error import MeanAndError
from lit_knn.metrics.kept_results import load_tensors, save_tensors
from lit_knn.reference import ReferenceSet
from lit_knn.sampling.samplers import EDM_GRID, heun_sampler, seeded_noise
from lit_knn.sampling.schedules import NoiseGrid
from lit_knn.theory.noise import EDM_PROCESS, Process

Row = dict[str, Any]
QUARTILES = {"q25": 0.25, "median": 0.5, "q75": 0.75}


class Agreement(NamedTuple):
    """Likeness of outputs to the outputs of a network, per image. All are (B,), float64.

    With w the network's output, y the other one, both flattened to d values, and w̄, ȳ their means over these values:

    Attributes:
        mse: ‖y − w‖² / d.
        r2: the coefficient of determination, 1 − ‖y − w‖² / ‖w − w̄‖²; at most 1, and negative if w̄ is nearer to w
            than y. Analytic Diffusion Studio reports it (with a variance over d − 1: its 1 − R² is smaller by 1/d).
        pearson_r: the correlation ⟨y − ȳ, w − w̄⟩ / (‖y − ȳ‖·‖w − w̄‖). The public code of Kamb and Ganguli computes
            this and calls it r². It forgives another contrast and brightness, which the other measures do not.
        pearson_r2: its square.
    """

    mse: Tensor
    r2: Tensor
    pearson_r: Tensor
    pearson_r2: Tensor


MEASURES = Agreement._fields
COLUMNS = {f"{name}{end}": float for name in MEASURES for end in ("", "_se")}  # those of `averaged`


def agreement(outputs: Tensor, network_outputs: Tensor) -> Agreement:
    """Compare images y with those of a network w, both (B, *shape). Images of a single value give NaN or −∞."""
    y, w = outputs.double().flatten(1), network_outputs.double().flatten(1)
    residual = (y - w).square().sum(1)
    y, w = (v - v.mean(1, keepdim=True) for v in (y, w))
    pearson_r = (y * w).sum(1) / (y.norm(dim=1) * w.norm(dim=1))
    return Agreement(residual / w.shape[1], 1 - residual / w.square().sum(1), pearson_r, pearson_r.square())


def averaged(measured: Mapping[str, MeanAndError]) -> Row:
    """Return mean and standard error (`_se`) of each measure as columns of a row."""
    row: Row = {}
    for name, (mean, error) in measured.items():
        row |= {name: mean, f"{name}_se": error}
    return row


def grouped(rows: Sequence[Row], *names: str) -> dict[tuple[Any, ...], list[Row]]:
    """Return the rows by their values of these columns."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return groups


@dataclass(frozen=True)
class SameNoise:
    """Samples the latents with the seeds 0, 1, … by EDM's sampler: estimators and networks alike."""

    reference: ReferenceSet  # the data, which tells the shape of the latents and the device
    num_steps: int = 18  # levels of the sampler
    grid: NoiseGrid = EDM_GRID
    batch_size: int = 128  # latents at a time; a random estimator's draws depend on it
    seed: int = 0  # first part of the key of an estimator's draws; the latents do not depend on it
    process: Process = EDM_PROCESS  # the noise process whose probability flow is integrated

    def draw(self, estimator: Estimator, num: int, advance: Callable[[int], Any] = lambda estimates: None) -> Tensor:
        """Sample the first `num` latents, (num, *shape) float32. All ranks call it, share the work and get all."""
        parts = in_every_process(lambda: [*self._own(estimator, num, advance)])
        in_order = sorted((part for own in parts for part in own), key=lambda part: part[0])
        return torch.cat([images for _, images in in_order]).to(self.reference.device)

    def kept(
        self, folder: Path, parts: Mapping[str, Estimator], num: int, bar: Bar = progress_bar
    ) -> dict[str, Tensor]:
        """Return the first `num` samples by name: from `folder`, or drawn now and kept there. All ranks call this."""
        if num == 0:
            return {}
        settings = {**self.settings(), "num": num}
        hashes = {name: fingerprint({"estimator": describe(part), **settings}) for name, part in parts.items()}
        paths = {name: folder / f"{name}_{own}.npz" for name, own in hashes.items()}
        found = on_first_rank(lambda: {name: load_tensors(path).get("images") for name, path in paths.items()})
        todo = num * sum(images is None for images in found.values())
        with bar(todo * (2 * self.num_steps - 1), "Sampling", " estimates") as shown:
            for name, images in found.items():
                if images is None:
                    shown.set_description(f"Samples of {name}")
                    found[name] = drawn = self.draw(parts[name], num, shown.update)
                    on_first_rank(partial(save_tensors, paths[name], images=drawn))
        return {name: images.to(self.reference.device) for name, images in found.items() if images is not None}

    def settings(self) -> dict[str, Any]:
        """Return what samples depend on besides the estimator, in JSON types."""
        return {
            "data": {"images": self.reference.fingerprint(), "index": describe(self.reference.index)},
            "num_steps": self.num_steps,
            "batch_size": self.batch_size,
            "seed": self.seed,
            "process": [type(self.process).__name__, str(sorted(vars(self.process).items()))],
            **asdict(self.grid),
        }

    def _own(self, estimator: Estimator, num: int, advance: Callable[[int], Any]) -> Iterator[tuple[int, Tensor]]:
        device = self.reference.device
        for batch, numbers in own_batches(num, self.batch_size):
            generator = keyed_generator(device, self.seed, batch, Stream.SAME_NOISE)

            def mean(z: Tensor, t: Tensor, generator: Generator = generator) -> Tensor:
                result = estimator.posterior_mean(z, t, generator=generator)
                advance(len(z))
                return result

            latents = seeded_noise(list(numbers), self.reference.shape, device=device)
            yield batch, heun_sampler(mean, latents, self.num_steps, self.grid, process=self.process).cpu()


def same_noise(samples: Mapping[str, Tensor], network_samples: Mapping[str, Tensor]) -> list[Row]:
    """Compare samples (n, *shape) of estimators with those of networks from the same latents, both by name.

    The result is a row for each pair of `estimator` and `network`: the number `num_latents`, and for each measure of
    `Agreement` its quartiles over the latents, `<measure>_q25`, `<measure>_median`, `<measure>_q75`.
    """
    rows = []
    for estimator, network in product(samples, network_samples):
        measured = latent_agreement(samples[estimator], network_samples[network])
        row: Row = {"estimator": estimator, "network": network, "num_latents": len(measured["mse"])}
        for name, values in measured.items():
            row |= {f"{name}_{quartile}": values.quantile(share).item() for quartile, share in QUARTILES.items()}
        rows.append(row)
    return rows


def latent_agreement(samples: Tensor, network_samples: Tensor) -> dict[str, Tensor]:
    """Return each measure of `Agreement`, (n,), for the first latents, which both have."""
    num = min(len(samples), len(network_samples))
    return agreement(samples[:num], network_samples[:num])._asdict()
