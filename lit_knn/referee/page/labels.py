"""Put short labels beside points, so that they cover neither points nor each other where there is room."""

from collections.abc import Iterable, Sequence

from matplotlib.axes import Axes

# Places around a point, (right, up) in units of the label's size. Diagonal ones come first: the front leaves its
# points upwards and to the right.
NEAR = ((1, 1), (-1, -1), (1, -1), (-1, 1), (-1, 0), (0, -1), (1, 0), (0, 1))
DISTANCES = (1.0, 1.8, 2.8, 4.0)
Box = tuple[float, float, float, float]


def label_points(axes: Axes, points: Sequence[tuple[float, float, str, str]], size: float = 6.5) -> None:
    """Write a label beside each point (x, y, text, colour), with a thin line to it where it stands away.

    The layout and the limits of the axes must be final. Labels take the place with the least overlap, in turn.
    """
    scale = axes.figure.dpi / 72
    spots = [tuple(axes.transData.transform((x, y))) for x, y, *_ in points]
    taken: list[Box] = [_around(spot, 2.2 * scale, 2.2 * scale) for spot in spots]
    inside = axes.bbox.extents
    for (x, y, text, colour), spot in zip(points, spots, strict=True):
        half_width, half_height = 0.32 * size * scale * len(text), 0.42 * size * scale
        candidates = [
            (spot[0] + distance * right * (half_width + 3 * scale), spot[1] + distance * up * (half_height + 3 * scale))
            for distance in DISTANCES
            for right, up in NEAR
        ]
        boxes = [_around(centre, half_width, half_height) for centre in candidates]
        costs = [_cost(box, taken, inside) for box in boxes]
        best = costs.index(min(costs))
        taken.append(boxes[best])
        offset = ((candidates[best][0] - spot[0]) / scale, (candidates[best][1] - spot[1]) / scale)
        line = {"arrowstyle": "-", "color": "0.6", "linewidth": 0.4, "shrinkA": 0, "shrinkB": 1}
        axes.annotate(
            text,
            (x, y),
            offset,
            textcoords="offset points",
            ha="center",
            va="center",
            fontsize=size,
            color=colour,
            arrowprops=line if best >= len(NEAR) else None,
            bbox={"facecolor": "white", "alpha": 0.7, "linewidth": 0, "pad": 0.2},
            # Above the front, which is drawn at 2, and below the points.
            zorder=2.5,
        )


def _around(centre: tuple[float, ...], half_width: float, half_height: float) -> Box:
    return (centre[0] - half_width, centre[1] - half_height, centre[0] + half_width, centre[1] + half_height)


def _cost(box: Box, taken: Iterable[Box], inside: Sequence[float]) -> float:
    """Return the covered area; a label that leaves the panel costs more than any cover."""
    outside = box[0] < inside[0] or box[1] < inside[1] or box[2] > inside[2] or box[3] > inside[3]
    return 1e9 * outside + sum(_overlap(box, other) for other in taken)


def _overlap(a: Box, b: Box) -> float:
    return max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
