"""Figure 4 (fig:ablation): FID against images seen; `python -m lit_knn.figures.figure4` draws it from training runs."""

from collections import Counter
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lit_knn.common.tables import TITLES
from lit_knn.figures.figure4.curves import Curve
from lit_knn.figures.style import dress, image_unit, log_values, look


def figure4(curves: Sequence[Curve], metric: str) -> Figure:
    """Draw two panels, k above and n below. Both also show the baseline, a run of the one-sample estimator, if given.

    Dotted lines show the best value of each curve, dashed lines the point where a curve passes the baseline's best. The
    curves are those of `read_curves`, and `metric` labels the axes.
    """
    knn = [curve for curve in curves if curve.k is not None]
    baselines = [curve for curve in curves if curve.k is None]
    panels = [(_vary(knn, "k"), "search size k"), (_vary(knn, "n"), "sample size n")]
    unit, divisor = image_unit(max(seen for curve in curves for seen, _ in curve.points))
    figure = Figure(figsize=(6, 7), layout="constrained")
    axes = figure.subplots(2, 1, sharex=True)
    for ax, (varied, title) in zip(axes, panels, strict=True):
        dress(ax, ylabel=TITLES.get(metric, metric))
        ax.set_title(f"Effect of the {title}", fontsize=10)
        _panel(ax, [*baselines, *varied], divisor)
    axes[-1].set_xlabel(f"Training images seen ({unit})")
    return figure


def _vary(curves: Sequence[Curve], name: str) -> list[Curve]:
    """Select the curves whose other option has its most common value (the larger one in a tie): only `name` differs."""
    other = "n" if name == "k" else "k"
    values = Counter(getattr(curve, other) for curve in curves)
    if not values:
        return []
    common = max(values, key=lambda value: (values[value], value))
    return sorted((c for c in curves if getattr(c, other) == common), key=lambda curve: getattr(curve, name))


def _panel(ax: Axes, curves: Sequence[Curve], divisor: float) -> None:
    baseline = next((curve for curve in curves if curve.estimator == "OneSample"), None)
    for number, curve in enumerate(curves):
        style = look(number) | ({"color": "black"} if curve is baseline else {})
        label = curve.estimator if curve.k is None else f"{curve.estimator} k={curve.k}, n={curve.n}"
        images = [seen / divisor for seen, _ in curve.points]
        ax.plot(images, [value for _, value in curve.points], label=label, **style)
        ax.axhline(curve.best, color=style["color"], linestyle=":", linewidth=1)
        if baseline is not None and curve is not baseline:
            passed = curve.passes(baseline)
            if passed is not None:
                ax.axvline(passed / divisor, color=style["color"], linestyle="--", linewidth=1)
    log_values(ax)
    ax.legend(fontsize=8)
