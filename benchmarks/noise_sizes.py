"""The noise of targets by design, as the weights see it: how many latents have any, and its gradient variance.

    python -m benchmarks.noise_sizes --set cifar16_1000 --kept cifar16.npz --weights last.ckpt --output rows.csv

The weights are the averaged ones of a checkpoint of `benchmarks.learning_curves --modules EDM`. A latent has noise if
the posterior's variance there is more than a millionth per dimension. Below the collapse it has none, and all targets
are the same.
Rows are added to the file.
"""

from pathlib import Path

import torch
from torch import Tensor

from benchmarks.common import add_rows, checkpoint_parser
from benchmarks.learning_curves.gradient_moments import flat_gradient, gradient_moments
from benchmarks.learning_curves.grid import COVARIANCES
from benchmarks.learning_curves.kind import REPEATS, Latents
from benchmarks.learning_curves.kinds import LATENT_KINDS
from benchmarks.learning_curves.sets import CIFAR, ImageSet, cifar
from lit_knn.common.one_line import errors_in_one_line
from lit_knn.common.rng import keyed_generator
from lit_knn.common.tables import Row
from lit_knn.estimators import Exact, Noised
from lit_knn.metrics.enumeration import mean_and_variance
from lit_knn.reference import ReferenceSet
from lit_knn.reference.streaming import all_sq_dist
from lit_knn.theory.posterior import log_posterior

LATENTS, REPEATED, CHUNK = 16_384, 12, 64
# The last part of the keys of the latents.
SIZES = 3
LEAST_VARIANCE, CLEAR_VARIANCE = 1e-6, 1e-3


def main() -> None:
    """Measure the noise at one checkpoint, and add its rows."""
    parser = checkpoint_parser(__doc__)
    choices = [name for name in CIFAR if not CIFAR[name].get("by_class")]
    parser.add_argument("--set", choices=choices, required=True)
    parser.add_argument("--kept", type=Path, required=True, help="the images, see learning_curves")
    args = parser.parse_args()

    torch.set_num_threads(1)
    about = {"set": args.set, "weights": args.about}
    with errors_in_one_line():
        image_set = cifar(args.set, None, args.kept)
        add_rows(args.output, lambda: [about | row for row in measure(image_set, args.weights)])


def measure(image_set: ImageSet, weights: Path) -> list[Row]:
    """Return a row for each covariance of the noise: the gradient variance at the latents that have noise."""
    kind, reference = LATENT_KINDS["EDM"], image_set.images().training
    latents = kind.latents(reference, LATENTS, SIZES)
    variances = posterior_variances(reference, latents)
    noisy = (variances > LEAST_VARIANCE).nonzero()[:, 0]
    x, z, t, lower = (part[noisy] for part in (latents.x, latents.z, latents.t, latents.lower))
    chosen = Latents(x, z, t, lower, None)

    exact = Exact().bind(reference)
    module = kind.make(image_set.net(), {"estimator": exact}, 0, image_set.lengths.steps, None)
    module.eval().load_state_dict(torch.load(weights, weights_only=True)["state_dict"])

    def gradient(repeat: int) -> Tensor:
        """Return the gradient of the chosen latents, (P,), with targets of one repeat."""
        generator = keyed_generator("cpu", repeat, REPEATS)
        return flat_gradient(
            lambda: module.objective(kind.losses(module, chosen, x, generator), x),
            module.parameters(),
        )

    gradient_of_exact = gradient(0)
    rows: list[Row] = []
    for covariance in COVARIANCES:
        module.estimator = Noised(Exact(), covariance, 1.0).bind(reference)
        moments = gradient_moments(map(gradient, range(REPEATED)), gradient_of_exact)
        rows.append(
            {
                "covariance": covariance,
                "latents": LATENTS,
                "with_noise": len(noisy),
                "with_clear_noise": int((variances > CLEAR_VARIANCE).sum()),
                "median_t": t.median().item(),
                "gradient_variance": moments.variance,
                "gradient_variance_se": moments.variance_se,
            }
        )
    return rows


def posterior_variances(reference: ReferenceSet, latents: Latents) -> Tensor:
    """Return the variance of the posterior p_t(x|z) per dimension, (B,), by enumeration in float64."""
    variances = []
    for z, t in zip(latents.z.split(CHUNK), latents.t.split(CHUNK), strict=True):
        p = log_posterior(all_sq_dist(reference, z), t).exp()
        variances.append(mean_and_variance(reference, p)[1])
    return torch.cat(variances)


if __name__ == "__main__":
    main()
