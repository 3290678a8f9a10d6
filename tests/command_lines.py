"""Command lines of the smallest runs, and the one line that a bad command line prints."""

import pytest

from main import main
from tests import ROOT

DEMO = str(ROOT / "configs" / "demo.yaml")
TINY = ["-c", str(ROOT / "tests" / "tiny.yaml"), "--model.net.channels", "8"]
TINY += ["--model.estimator.k", "32", "--model.estimator.n", "8", "--trainer.max_steps", "1"]
# Lightning writes these lines to stderr at every start.
HARMLESS = ("Seed set to", "GPU available", "TPU available", "💡 Tip")
# Data say which layout they were taken in.
LAYOUTS = ("images, NCHW", "images, NHWC")


def refusal_of(args, capsys):
    """Run a bad command line in this process, and return the only line that it prints."""
    with pytest.raises(SystemExit) as stop:
        main(args)
    assert stop.value.code == 2
    lines = [
        line
        for line in capsys.readouterr().err.splitlines()
        if line.strip() and not line.startswith(HARMLESS)
    ]
    lines = [line for line in lines if not any(layout in line for layout in LAYOUTS)]
    assert len(lines) == 1, lines
    assert lines[0].startswith("error: ")
    return lines[0]
