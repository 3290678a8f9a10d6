"""Measures time and peak memory of a training step of each module beside LitICT's: same network, batch and estimator.

    python -m benchmarks.modules [--estimators OneSample KNN] [--channels 32] [--output STEM]

Each module trains in its own process, and the modules take turns for several rounds. The time of a step is the least
over the rounds. On a CPU it is the processor time of all threads, which other programs on the machine hardly change; on
a GPU it is the time on the wall. Memory is what training adds to the process, with weights and optimiser: on a GPU the
peak of PyTorch's memory, on a CPU the peak of the process above its memory before the fit. Ratios are to iCT.
"""

import argparse
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch

from benchmarks.common import Output, Rows, markdown
from benchmarks.gpu.images import synthetic_images
from benchmarks.gpu.training import Images
from benchmarks.sharded import Peak
from benchmarks.step_clock import StepClock
from lit_knn.common.checkpoint_file import MODEL_KEY
from lit_knn.common.errors import told_in_one_line
from lit_knn.common.memory import process_bytes
from lit_knn.estimators import KNN, STF, Estimator, Exact, OneSample
from lit_knn.modules import LitECT, LitEDM, LitFlow, LitICT
from lit_knn.nets import DDPMpp
from lit_knn.referee.child_process import in_own_process
from lit_knn.reference import ReferenceSet


def _tuned(net: DDPMpp, estimator: Estimator) -> LitECT:
    """Make LitECT start from random weights, which take the time of trained ones."""
    edm = LitEDM(net, estimator)
    edm.image_shape = (3, net.image_size, net.image_size)
    told = {**edm.generative_model().description(), "prefix": "denoiser.model."}
    saved = {"state_dict": edm.state_dict(), MODEL_KEY: told}
    with tempfile.TemporaryDirectory() as folder:
        torch.save(saved, f"{folder}/edm.ckpt")
        return LitECT(estimator, f"{folder}/edm.ckpt", net)


MODULES: dict[str, Callable[[DDPMpp, Estimator], pl.LightningModule]] = {
    "iCT": LitICT,
    "ECT": _tuned,
    "EDM": LitEDM,
    "flow": LitFlow,
}
FIRST = "iCT"
# With the paper's k and n.
ESTIMATORS: dict[str, Callable[[], Estimator]] = {"OneSample": OneSample, "STF": STF, "KNN": KNN, "Exact": Exact}


class Setting(NamedTuple):
    """Settings that all modules share: the device, the size of images, network and batch, and the numbers of steps."""

    device: str
    threads: int
    side: int
    images: int
    channels: int
    batch: int
    warm_up: int
    steps: int


class Clock(StepClock):
    """A `StepClock` that also reads the processor time of the measured steps."""

    cpu_seconds = 0.0

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """See `StepClock`."""
        before = self.started
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if self.started and not before:
            self.cpu_seconds -= time.process_time()
        elif self.values:
            self.cpu_seconds += time.process_time()


def train(module: str, estimator: str, setting: Setting) -> dict[str, float]:
    """Train some steps in this process. Returns the seconds of a step and the bytes that training adds."""
    torch.set_num_threads(setting.threads)
    device = torch.device(setting.device)
    reference = ReferenceSet(synthetic_images(setting.images, (3, setting.side, setting.side), device))
    clock, peak, before = Clock(setting.warm_up, setting.steps), Peak(), process_bytes("RssAnon")
    peak.start()
    net = DDPMpp(setting.side, 3, setting.channels, (2, 2), 2, (setting.side // 2,), dropout=0.1)
    model = MODULES[module](net, ESTIMATORS[estimator]())
    trainer = pl.Trainer(
        accelerator="gpu" if device.type == "cuda" else "cpu", devices=1, max_steps=setting.warm_up + setting.steps,
        callbacks=[clock], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, log_every_n_steps=10**6,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(model, Images(reference, setting.batch))
    wall = setting.batch / clock.values["train/images_per_s"]
    share = clock.values["estimator/share_of_time"]
    if device.type == "cuda":
        return {"seconds": wall, "estimator_share": share, "bytes": torch.cuda.max_memory_allocated(device)}
    return {"seconds": clock.cpu_seconds / setting.steps, "estimator_share": share, "bytes": peak.bytes - before}


def measure(
    estimators: Sequence[str], setting: Setting, rounds: int, run: Callable[..., tuple[Any, Any]] = in_own_process
) -> Rows:
    """Train all modules in turn, with each estimator; one row for each of both. `run` starts a process."""
    rows: Rows = []
    for estimator in estimators:
        seen: dict[str, list[dict[str, float]]] = {module: [] for module in MODULES}
        for _ in range(rounds):
            for module, readings in seen.items():
                readings.append(run(train, module, estimator, setting)[0])
        least = {m: {key: min(r[key] for r in readings) for key in readings[0]} for m, readings in seen.items()}
        for module, values in least.items():
            ratios = {f"{key}_ratio": values[key] / least[FIRST][key] for key in ("seconds", "bytes")}
            rows.append({"estimator": estimator, "module": module, **values, **ratios})
    return rows


def table(rows: Rows) -> str:
    """Make a Markdown table."""
    lines = [["estimator", "module", "s per step", "of iCT", "memory, MiB", "of iCT", "estimator's share"]]
    for row in rows:
        time_, memory = f"{row['seconds']:.3g}", f"{row['bytes'] / 2**20:.0f}"
        ratios = f"{row['seconds_ratio']:.2f}", f"{row['bytes_ratio']:.2f}"
        share = f"{row['estimator_share']:.1%}"
        lines.append([row["estimator"], row["module"], time_, ratios[0], memory, ratios[1], share])
    return markdown(lines)


@told_in_one_line()
def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print a table, and write the requested files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--estimators", nargs="+", default=["OneSample", "KNN"], choices=list(ESTIMATORS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--side", type=int, default=32, help="height and width of the images")
    parser.add_argument("--images", type=int, default=5000, help="images in the reference set")
    parser.add_argument("--channels", type=int, default=32, help="channels of the network")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--warm_up", type=int, default=2, help="steps before the clock starts")
    parser.add_argument("--steps", type=int, default=5, help="steps measured")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="stem of the files")
    args = parser.parse_args(argv)
    output = Output(args.output, "csv", "md")
    setting = Setting(*(getattr(args, name) for name in Setting._fields))
    rows = measure(args.estimators, setting, args.rounds)
    output.write_rows(rows)
    where = torch.cuda.get_device_name() if args.device == "cuda" else f"CPU, {args.threads} thread(s)"
    command = " ".join(["python -m benchmarks.modules", *(sys.argv[1:] if argv is None else argv)])
    output.tell(f"`{command}`\n{where}, torch {torch.__version__}, {setting}\n\n{table(rows)}")


if __name__ == "__main__":
    main()
