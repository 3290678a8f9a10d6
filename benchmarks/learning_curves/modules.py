"""The training modules of the learning curves by name, in the order of the report."""

from benchmarks.learning_curves.consistency import ECT, ICT
from benchmarks.learning_curves.kinds import Kind
from benchmarks.learning_curves.regression import EDM, Flow

KINDS: dict[str, Kind] = {"EDM": EDM(), "flow": Flow(), "iCT": ICT(), "ECT": ECT()}
