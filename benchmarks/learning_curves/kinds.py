"""All training modules of the learning curves by name."""

from benchmarks.learning_curves.few_step_kinds import ECT, ICT, MeanFlow
from benchmarks.learning_curves.kind import Kind, LatentKind
from benchmarks.learning_curves.regression_kinds import EDM, Flow
from benchmarks.learning_curves.score_difference_kind import (
    ScoreDifference,
    ScoreDifferenceFromNothing,
)
from benchmarks.learning_curves.sct_kind import SCT
from benchmarks.learning_curves.variants import (
    LaterMeanFlow,
    PlainSCT,
    SquaredECT,
    SquaredMeanFlow,
    VariedECT,
)

# In the order of the report.
KINDS: dict[str, Kind] = {
    "EDM": EDM(),
    "flow": Flow(),
    "iCT": ICT(),
    "ECT": ECT(),
    "MeanFlow": MeanFlow(),
    "sCT": SCT(),
    "score difference": ScoreDifference(),
    "score difference from nothing": ScoreDifferenceFromNothing(),
    "MeanFlow power 0": SquaredMeanFlow(),
    "MeanFlow v1": LaterMeanFlow(),
    "sCT without norm": PlainSCT(),
    "ECT squared": SquaredECT(),
    # As "ECT", whose averages of other lengths are measured, too.
    "ECT lr 1e-3": VariedECT(),
    "ECT lr 3e-4": VariedECT(lr=3e-4),
    "ECT lr 1e-4": VariedECT(lr=1e-4),
    # Without the sigmoid the mapping has one relative gap for all t in each stage.
    "ECT k 0": VariedECT(k=0.0),
}
# Those whose loss is measured at fixed latents, too.
LATENT_KINDS = {name: kind for name, kind in KINDS.items() if isinstance(kind, LatentKind)}
