"""Trains for a while with validations and two loggers, and measures whether the memory of the run grows.

    python -m benchmarks.soak [--minutes 30] [--output soak] [options of main.py fit …]

It trains the demo, or another run (`-c CONFIG …`), in a process of its own, measures its memory every two seconds, and
stops it by SIGTERM. The first fifth of the time is the warm-up. The growth compares the mean memory in the first fifth
after it with that in the last fifth.
"""

import argparse
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from lit_knn.common.errors import InputError, told_in_one_line
from lit_knn.common.memory import process_bytes
from lit_knn.common.tables import write_rows
from lit_knn.figures.save import save_figure
from lit_knn.figures.style import dress, look

ROOT = Path(__file__).parent.parent
SECONDS_BETWEEN_SAMPLES = 2.0
# No training ends before the soak does.
ENDLESS = ["--trainer.max_steps", "100000000", "--trainer.enable_progress_bar", "false"]
LOGGERS = """\
trainer:
  logger:
    - class_path: pytorch_lightning.loggers.TensorBoardLogger
      init_args: {save_dir: FOLDER, name: tensorboard}
    - class_path: pytorch_lightning.loggers.CSVLogger
      init_args: {save_dir: FOLDER, name: csv}
"""


def soak(options: Sequence[str], minutes: float) -> list[tuple[float, int]]:
    """Train for some minutes; return (seconds since the start, resident bytes) at each sample.

    Raises:
        InputError: the training ended by itself.
    """
    with tempfile.TemporaryDirectory() as folder:
        loggers = Path(folder, "loggers.yaml")
        loggers.write_text(LOGGERS.replace("FOLDER", folder))
        command = [sys.executable, str(ROOT / "main.py"), "fit", *options, "-c", str(loggers), *ENDLESS]
        process = subprocess.Popen(command, cwd=ROOT)
        start, samples = time.monotonic(), []
        try:
            while (passed := time.monotonic() - start) < 60 * minutes:
                samples.append((passed, process_bytes("VmRSS", process.pid)))
                time.sleep(SECONDS_BETWEEN_SAMPLES)
                if process.poll() is not None:
                    raise InputError(f"the training ended with status {process.returncode} after {passed:.0f} s")
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
    return samples


def growth(samples: Sequence[tuple[float, int]]) -> float:
    """Return the relative growth of memory after the warm-up, which leaves 0.8 of the time: a fifth of it is 0.16."""
    end = samples[-1][0]

    def mean(first: float, last: float) -> float:
        chosen = [held for passed, held in samples if first * end <= passed <= last * end]
        return sum(chosen) / len(chosen)

    return mean(0.84, 1.0) / mean(0.2, 0.36) - 1


def picture(samples: Sequence[tuple[float, int]]) -> Figure:
    """Draw memory over time."""
    figure = Figure(figsize=(6, 3.2), layout="constrained")
    axes = figure.subplots()
    style = look(0) | {"marker": ""}
    axes.plot([passed / 60 for passed, _ in samples], [held / 1e9 for _, held in samples], **style)
    axes.axvline(samples[-1][0] / 300, color="0.5", linestyle=":", linewidth=1)
    dress(axes, xlabel="minutes (dotted: end of the warm-up)", ylabel="resident memory [GB]")
    axes.set_ylim(bottom=0)
    return figure


def main(args: Sequence[str] | None = None) -> None:
    """Run the soak of the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0, help="length of the training")
    parser.add_argument("--output", default="soak", help="path of the table and the picture, without suffix")
    options, fit = parser.parse_known_args(args)
    demo = ["-c", "configs/demo.yaml", "--trainer.val_check_interval", "200"]
    with told_in_one_line():
        samples = soak(fit or demo, options.minutes)
    write_rows(Path(f"{options.output}.csv"), [{"seconds": round(s, 1), "bytes": held} for s, held in samples])
    save_figure(picture(samples), options.output)
    print(f"{len(samples)} samples in {options.minutes:g} minutes, at the end {samples[-1][1] / 1e9:.3f} GB")
    print(f"growth after the warm-up: {growth(samples):+.2%}")


if __name__ == "__main__":
    main()
