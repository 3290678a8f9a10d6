"""Error, time and memory of the estimators on a real data set (design: mean squared error against the exact mean).

    python benchmarks/estimators.py --data PATH [--t 5 10 20 80] [--batch 128] [--repeats 4]

prints, for each noise level, the mean squared error per dimension of each estimator's posterior mean against the exact
one (Eq. 15, eq:mse), its time per call as a ratio to the plain KNN estimator, and the largest difference of `Exact`
from a float64 sum over all images. Peak memory is that of a process of its own for each estimator.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

from lit_knn.estimators import KNN, STF, Estimator, Exact, MonteCarlo, OneSample, UniformSNIS
from lit_knn.image_files import read_array_file, read_image_files
from lit_knn.index import FaissIndex
from lit_knn.process import forward_noise
from lit_knn.reference import ReferenceSet
from lit_knn.rng import keyed_generator

PLAIN = "KNN"


def estimators(k: int, n: int) -> dict[str, Estimator]:
    """The estimators by name; the plain method first, so that every later time is a ratio to it."""
    return {
        PLAIN: KNN(k, n),
        "OneSample": OneSample(),
        "STF": STF(n),
        "UniformSNIS": UniformSNIS(n),
        "MonteCarlo": MonteCarlo(n),
        "Exact": Exact(),
    }


def load(path: Path) -> ReferenceSet:
    """A reference set from a zip or folder of images, or an .npy or .npz file."""
    read = read_array_file if path.suffix in (".npy", ".npz") else read_image_files
    images, _ = read(path)
    return ReferenceSet(images, index=FaissIndex("Flat"))


def brute_force_mean(reference: ReferenceSet, z: Tensor, t: float) -> Tensor:
    """E[x|z,t] of each z by subtracting every image from it in float64, one z at a time: slow and plain."""
    x = reference.gather(torch.arange(reference.N)).flatten(1)
    means = []
    for row in z.flatten(1).double():
        sq_dist = torch.cat([(chunk.double() - row).square().sum(1) for chunk in x.split(2048)])
        weights = torch.softmax(-sq_dist / (2 * t * t), dim=0)
        means.append(sum(w @ c.double() for w, c in zip(weights.split(2048), x.split(2048), strict=True)))
    return torch.stack(means).reshape(z.shape)


def measure(reference: ReferenceSet, args: argparse.Namespace) -> None:
    """Print the table of error and time."""
    bound = {name: estimator.bind(reference) for name, estimator in estimators(args.k, args.n).items()}
    print(f"N={reference.N} d={reference.d} B={args.batch} k={args.k} n={args.n} threads={torch.get_num_threads()}")
    print(f"{'t':>5}  {'estimator':<12} {'MSE':>9} {'± s.e.':>8} {'s/call':>7} {'ratio':>6}")
    for t in args.t:
        rows: dict[str, tuple[list[Tensor], float]] = {name: ([], 0.0) for name in bound}
        for repeat in range(args.repeats):
            generator = keyed_generator("cpu", repeat)
            x = reference.gather(torch.randint(reference.N, (args.batch,), generator=generator))
            z = forward_noise(x, t, torch.randn(x.shape, generator=generator))
            mu = bound["Exact"].posterior_mean(z.double(), t)
            for name, estimator in bound.items():
                start = time.perf_counter()
                mu_hat = estimator.posterior_mean(z, t, x_source=x, generator=generator)
                seconds = time.perf_counter() - start
                errors, total = rows[name]
                errors.append((mu_hat - mu).square().flatten(1).mean(1))
                rows[name] = errors, total + seconds / args.repeats
        for name, (errors, seconds) in rows.items():
            error = torch.cat(errors)
            spread = error.std() / len(error) ** 0.5
            ratio = seconds / rows[PLAIN][1]
            print(f"{t:5g}  {name:<12} {error.mean():9.2e} {spread:8.1e} {seconds:7.3f} {ratio:6.2f}", flush=True)
        checked = z[: args.checked]
        difference = bound["Exact"].posterior_mean(checked, t) - brute_force_mean(reference, checked, t)
        print(f"{t:5g}  Exact - brute force in float64, {len(checked)} z: at most {difference.abs().max():.1e}")


def print_peak_memory(args: argparse.Namespace) -> None:
    """Print the peak resident memory of one call of each estimator, each in a process of its own."""
    print(f"\n{'peak memory':<16} {'MiB':>7}  above the images alone")
    base = None
    for name in ("images alone", *estimators(args.k, args.n)):
        command = [sys.executable, __file__, *sys.argv[1:], "--peak-memory-of", name]
        peak = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        base = peak if base is None else base
        print(f"{name:<16} {peak:7d}  {peak - base:+d}", flush=True)


def peak_memory(reference: ReferenceSet, args: argparse.Namespace) -> int:
    """Peak resident memory of this process, MiB, after one call of `args.peak_memory_of` at B = args.batch (Linux)."""
    x = reference.gather(torch.arange(args.batch))
    if args.peak_memory_of in estimators(args.k, args.n):
        estimator = estimators(args.k, args.n)[args.peak_memory_of].bind(reference)
        estimator.posterior_mean(forward_noise(x, 10.0, torch.randn_like(x)), 10.0, x_source=x)
    # Not ru_maxrss: that of a child starts at the size of its parent.
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) // 1024


def main() -> None:
    """Parse the command line and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="zip or folder of images, .npy or .npz")
    parser.add_argument("--t", type=float, nargs="+", default=[2, 5, 10, 20, 80], help="noise levels")
    parser.add_argument("--batch", type=int, default=128, help="latents per call")
    parser.add_argument("--repeats", type=int, default=4, help="calls averaged, each with new latents")
    parser.add_argument("--k", type=int, default=2048, help="neighbours")
    parser.add_argument("--n", type=int, default=256, help="samples")
    parser.add_argument("--checked", type=int, default=16, help="latents compared with the brute-force sum")
    parser.add_argument("--peak-memory-of", default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    reference = load(args.data)
    if args.peak_memory_of:
        print(peak_memory(reference, args))
        return
    measure(reference, args)
    print_peak_memory(args)


if __name__ == "__main__":
    main()
