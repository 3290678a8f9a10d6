"""Measures training with each estimator: the images per second, and the estimator's share of the time of a step.

    python -m benchmarks.training -c configs/table1/ict_knn.yaml [--data.batch_size 1024 …]

It trains a few steps of a run, once for each estimator in float32, then once more in bf16 and in bf16 with a compiled
network, all in one process, and prints images per second as ratios to the first row. Options of the run follow its
config, as in `main.py fit`.
"""

import argparse
import gc
import sys
from pathlib import Path

import torch
import yaml

from benchmarks.step_clock import StepClock
from lit_knn.commands.cli.cli import make_cli

ROOT = Path(__file__).parent.parent
ESTIMATORS = ("one_sample", "stf", "knn", "subspace_knn", "exact")
PRECISIONS = {
    "fp32": ["--trainer.precision", "32-true"],
    "bf16": ["--trainer.precision", "bf16-mixed"],
    "bf16 compiled": ["--trainer.precision", "bf16-mixed", "--trainer.callbacks+", "lit_knn.callbacks.NetworkSpeed"],
}


def measure(run: list[str], warmup: int, steps: int) -> tuple[dict[str, float], float]:
    """Train one variant; return its readings and the peak of PyTorch's GPU memory in GiB (0 on a CPU)."""
    quiet = ["--trainer.logger", "false", "--trainer.enable_progress_bar", "false", "--trainer.callbacks", "[]"]
    quiet += ["--trainer.limit_val_batches", "0", "--trainer.enable_checkpointing", "false"]
    quiet += ["--trainer.enable_model_summary", "false", "--trainer.log_every_n_steps", "1000000"]
    quiet += ["--trainer.max_steps", str(warmup + steps)]
    at = run.index("--trainer.callbacks+") if "--trainer.callbacks+" in run else len(run)
    cli = make_cli([*run[:at], *quiet, *run[at:]], run=False)
    if torch.cuda.is_available():
        gc.collect()  # This frees the memory of the previous variant.
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    clock = StepClock(warmup, steps)
    cli.trainer.callbacks.append(clock)  # type: ignore[attr-defined]
    cli.trainer.fit(cli.model, cli.datamodule)
    return clock.values, torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0


def estimator_options(name: str, **counts: int | None) -> list[str]:
    """Return options that switch to an estimator of `configs/estimators`; counts that it does not have are left out."""
    path = ROOT / "configs" / "estimators" / f"{name}.yaml"
    own = yaml.safe_load(path.read_text()).get("init_args", {})
    given = {option: value for option, value in counts.items() if value is not None and option in own}
    return ["--model.estimator", str(path), *(f"--model.estimator.{option}={value}" for option, value in given.items())]


def main() -> None:
    """Measure every variant and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-c", "--config", required=True, help="config file of the run")
    parser.add_argument("--warmup", type=int, default=5, help="optimiser steps before the clock starts")
    parser.add_argument("--steps", type=int, default=20, help="optimiser steps measured")
    parser.add_argument("--estimators", nargs="+", default=list(ESTIMATORS), help="files in configs/estimators")
    parser.add_argument("--precisions", nargs="+", default=list(PRECISIONS), choices=list(PRECISIONS))
    parser.add_argument("--k", type=int, help="neighbours, for small data sets")
    parser.add_argument("--n", type=int, help="draws, for small data sets")
    args, options = parser.parse_known_args()
    first, rows = args.precisions[0], []
    rows += [(name, first) for name in args.estimators]
    rows += [(args.estimators[0], precision) for precision in args.precisions[1:]]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
    print(f"{' '.join(sys.argv)}\n{device}, torch {torch.__version__}\n")
    print("| estimator | precision | images/s | ratio | estimator's share | GPU memory (PyTorch) |")
    print("|---" * 6 + "|")
    base = None
    for name, precision in rows:
        run = ["-c", args.config, *estimator_options(name, k=args.k, n=args.n), *options, *PRECISIONS[precision]]
        values, memory = measure(run, args.warmup, args.steps)
        speed = values["train/images_per_s"]
        base = base or speed
        share = values["estimator/share_of_time"]
        print(
            f"| {name} | {precision} | {speed:.4g} | {speed / base:.3f} | {share:.1%} | {memory:.1f} GiB |", flush=True
        )


if __name__ == "__main__":
    main()
