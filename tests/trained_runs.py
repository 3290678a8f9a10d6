"""Folders of tiny training runs, whose networks have random weights in the place of barely trained ones."""

from pathlib import Path

import torch
from filelock import FileLock
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from main import main
from tests.command_lines import ROOT, TINY

CONFIGS = {
    "ict": "demo",
    "ict_classes": "table1/digits_conditional",
    "edm": "table2/digits",
    "edm_classes": "table2/digits_conditional",
    "ect": "ect/digits",
    "flow": "flow/digits",
    "mean_flow": "meanflow/digits",
}
# Two validations, and a log of each step.
STEPS = [
    "--trainer.max_steps",
    "4",
    "--trainer.val_check_interval",
    "2",
    "--trainer.log_every_n_steps",
    "1",
]


def shared_run(root, kind):
    """The run's folder and its options; whichever process needs a run first trains it, for all processes and tests."""
    folder, ready = Path(root) / "runs", Path(root) / f"{kind}.options"
    more = ["--model.start", str(last(shared_run(root, "edm")[0]))] if kind == "ect" else []
    with FileLock(Path(root) / f"{kind}.lock"):
        if not ready.exists():
            _, options = leave_run(folder, kind, *STEPS, *more)
            ready.write_text("\n".join(options))
    return folder / kind / "knn_0", ready.read_text().splitlines()


def leave_run(folder, kind, *args):
    """Train for one step, then replace the weights in the checkpoint; returns the run's folder and its options."""
    options = [
        "-c",
        str(ROOT / "configs" / f"{CONFIGS[kind]}.yaml"),
        *TINY,
        "--model.net.dropout",
        "0.5",
        *args,
    ]
    main(["fit", *options, "--trainer.logger.save_dir", str(folder), "--trainer.logger.name", kind])
    run = Path(folder) / kind / "knn_0"
    checkpoint, generator = (
        torch.load(last(run), weights_only=True),
        torch.Generator().manual_seed(1),
    )
    # The last layer starts at zero, so that barely trained networks give nearly the same images.
    for value in checkpoint["state_dict"].values():
        value.copy_(0.1 * torch.randn(value.shape, generator=generator))
    torch.save(checkpoint, last(run))
    return run, options


def last(run):
    return run / "checkpoints" / "last.ckpt"


def events_of(run):
    """Read what TensorBoard has of a run: its events, and the values by name, {name: [value]}."""
    events = EventAccumulator(str(run))
    events.Reload()
    return events, {
        name: [event.value for event in events.Scalars(name)] for name in events.Tags()["scalars"]
    }
