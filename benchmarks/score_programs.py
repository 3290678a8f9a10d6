"""Compares `lit_knn.metrics.score` with torch-fidelity, prdc and pytorch-fid on the same folders: values and times.

    python -m benchmarks.score_programs SAMPLES REAL

All programs read the files themselves, and compare the pixels in [-1, 1]: so no weights of networks are needed, and the
times are those of reading and comparing. `pip install '.[dev]'` brings the programs.
"""

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch_fidelity
from prdc import compute_prdc
from pytorch_fid.fid_score import calculate_activation_statistics, calculate_frechet_distance
from torch import Tensor, nn
from torch_fidelity.feature_extractor_base import FeatureExtractorBase

from benchmarks.common import markdown
from lit_knn.data.reading import reference_from
from lit_knn.metrics import ScoreOptions, score

# torch-fidelity has these names for the metrics.
TORCH_FIDELITY = {
    "fd_pixels": "frechet_inception_distance",
    "kid": "kernel_inception_distance_mean",
    "precision": "precision",
    "recall": "recall",
}
FLAGS = {"fd_pixels": "fid", "kid": "kid", "precision": "prc"}
OURS = {"fd_pixels": "fd_pixels", "kid": "kid", "precision": "pr", "density": "dc"}
Values = dict[str, float]


class FlatPixels(FeatureExtractorBase):
    """The pixels as features for torch-fidelity."""

    def __init__(self, name: str, features_list: list[str], **_: object) -> None:
        super().__init__(name, features_list)

    def forward(self, pixels: Tensor) -> tuple[Tensor]:
        return ((pixels.float() / 127.5 - 1).flatten(1),)

    @staticmethod
    def get_provided_features_list() -> tuple[str]:
        return ("all",)

    @staticmethod
    def get_default_feature_layer_for_metric(metric: str) -> str:
        return "all"

    @staticmethod
    def can_be_compiled() -> bool:
        return False


class FlatValues(nn.Module):
    """The pixels as features for pytorch-fid, whose images are in [0, 1]."""

    def forward(self, x: Tensor) -> list[Tensor]:
        return [(2 * x - 1).flatten(1)[:, :, None, None]]


def by_torch_fidelity(samples: str, real: str, flag: str) -> Values:
    """Return the values of one of torch-fidelity's metrics, by our names."""
    measured = torch_fidelity.calculate_metrics(
        input1=samples,
        input2=real,
        feature_extractor="flat-pixels",
        **dict.fromkeys((flag, "save_cpu_ram"), True),
        **dict.fromkeys(("cuda", "verbose", "cache"), False),
    )
    return {name: measured[key] for name, key in TORCH_FIDELITY.items() if key in measured}


def by_prdc(samples: str, real: str) -> Values:
    """Return density and coverage, k = 5, of the authors' code."""
    sets = [reference_from(path).images.flatten(1).numpy() / 127.5 - 1 for path in (real, samples)]
    values: Values = compute_prdc(*sets, nearest_k=5)
    return {name: values[name] for name in ("density", "coverage")}


def by_pytorch_fid(samples: str, real: str) -> Values:
    """Return the Fréchet distance of pytorch-fid."""
    statistics = []
    for folder in (samples, real):
        files = sorted(Path(folder).iterdir())
        d = reference_from(folder).d
        statistics.append(calculate_activation_statistics(files, FlatValues(), 50, d, "cpu", 0))
    return {"fd_pixels": calculate_frechet_distance(*statistics[0], *statistics[1])}


def by_score(samples: str, real: str, metric: str) -> Values:
    """Return the values of one metric of ours, without standard errors."""
    options = ScoreOptions(features="pixels", splits=0)
    values = {}
    for row in score(samples, real, metric, options=options):
        values[str(row["metric"])] = float(row["value"])
    return values


def timed(measure: Callable[[], Values]) -> tuple[Values, float]:
    """Return values and the seconds that they took."""
    start = time.perf_counter()
    values = measure()
    return values, time.perf_counter() - start


def main(samples: str, real: str) -> None:
    """Print a table: for each metric the values and seconds of both programs."""
    torch.set_num_threads(1)
    torch_fidelity.register_feature_extractor("flat-pixels", FlatPixels)
    by_score(samples, real, "fd_pixels")  # The first call loads libraries.

    rivals: list[tuple[str, str, Callable[[], Values]]] = []
    for name, flag in FLAGS.items():
        rivals.append(("torch-fidelity", name, partial(by_torch_fidelity, samples, real, flag)))
    rivals.append(("prdc", "density", partial(by_prdc, samples, real)))
    rivals.append(("pytorch-fid", "fd_pixels", partial(by_pytorch_fid, samples, real)))

    table = [["metric", "program", "value", "ours", "seconds", "ours"]]
    for program, first, measure in rivals:
        values, seconds = timed(measure)
        by_us, our_seconds = timed(partial(by_score, samples, real, OURS[first]))
        times = [f"{seconds:.1f}", f"{our_seconds:.1f}"]
        for name, value in values.items():
            table.append([name, program, f"{value:.7g}", f"{by_us[name]:.7g}", *times])
    print(markdown(table))


if __name__ == "__main__":
    main(*sys.argv[1:])
