"""Squared bias and variance of the gradient of one-sample and KNN targets on the digits, for robust and squared losses.

    python -m benchmarks.gradient_bias --module ECT --weights last.ckpt --output rows.csv

The weights are a checkpoint of `benchmarks.learning_curves`: of its EDM runs for ECT, and of its mean flows for these.
They are the averaged ones, while the gradients of the learning curves are at the current ones.
At 64 fixed latents each draw of the targets gives a gradient. Its mean is compared with the gradient of exact targets.
The 95 % t-intervals are over groups of draws, at one network. Rows are added to the file.
"""

from pathlib import Path
from typing import Any

import torch

from benchmarks.common import add_rows, checkpoint_parser
from benchmarks.learning_curves.gradient_moments import gradient_moments
from benchmarks.learning_curves.kinds import LATENT_KINDS
from benchmarks.learning_curves.measurements import Measurements, same_targets
from benchmarks.learning_curves.sets import ImageSet, digits
from benchmarks.learning_curves.statistics import interval
from lit_knn.common.one_line import errors_in_one_line
from lit_knn.estimators import KNN, Estimator, OneSample

GROUPS, DRAWS_OF_A_GROUP = 8, 40


def main() -> None:
    """Measure one module at one checkpoint, and add its rows."""
    parser = checkpoint_parser(__doc__)
    parser.add_argument("--module", choices=list(LATENT_KINDS), required=True)
    args = parser.parse_args()

    torch.set_num_threads(1)
    about = {"module": args.module, "weights": args.about}
    with errors_in_one_line():
        add_rows(
            args.output,
            lambda: [about | row for row in measure(digits(), args.module, args.weights)],
        )


def measure(image_set: ImageSet, name: str, weights: Path) -> list[dict[str, Any]]:
    """Return a row for each kind of targets: variance and squared bias with their intervals.

    Args:
        image_set: the images and the network.
        name: the module, one of `LATENT_KINDS`.
        weights: the checkpoint; a module that tunes starts from it.
    """
    kind, images = LATENT_KINDS[name], image_set.images()
    lengths = image_set.lengths._replace(repeats=GROUPS * DRAWS_OF_A_GROUP)
    measurements = Measurements(kind, images, lengths)

    net = image_set.net(**kind.net_options)
    start = weights if kind.tunes else None
    module = kind.make(net, {"estimator": OneSample()}, 0, lengths.steps, start).eval()
    if not kind.tunes:
        module.load_state_dict(torch.load(weights, weights_only=True)["state_dict"])

    with same_targets(module, measurements.exact):
        exact = measurements.gradient(module, 0)
    targets: dict[str, Estimator] = {
        "OneSample": OneSample(),
        "KNN": KNN(k=256, n=64).bind(images.training),
    }

    rows = []
    for label, estimator in targets.items():
        variances, biases, shares = [], [], []
        for group in range(GROUPS):
            draws = range(group * DRAWS_OF_A_GROUP, (group + 1) * DRAWS_OF_A_GROUP)
            with same_targets(module, estimator):
                gradients = [measurements.gradient(module, draw) for draw in draws]
            moments = gradient_moments(gradients, exact)
            variances.append(moments.variance)
            biases.append(moments.bias_sq)
            shares.append(moments.bias_sq / moments.variance)

        variance, bias, share = interval(variances), interval(biases), interval(shares)
        rows.append(
            {
                "targets": label,
                "variance": variance.mean,
                "variance_95": variance.half_width,
                "bias_sq": bias.mean,
                "bias_sq_95": bias.half_width,
                "share": share.mean,
                "share_95": share.half_width,
                "exact_norm_sq": exact.double().square().sum().item(),
                "draws": lengths.repeats,
            }
        )
    return rows


if __name__ == "__main__":
    main()
