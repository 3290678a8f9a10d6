"""`score` compares samples of any program with any data."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from lit_knn.common.errors import InputError
from lit_knn.common.tables import Row
from lit_knn.data.files import say
from lit_knn.data.image_stream import ImageStream, stream_of_path, stream_of_set
from lit_knn.data.reading import reference_from
from lit_knn.metrics.feature_statistics import doubt_about
from lit_knn.metrics.score_data import ScoreData
from lit_knn.metrics.score_options import ScoreOptions, checked_metrics
from lit_knn.metrics.scorer import Scorer
from lit_knn.metrics.statistics_files import is_statistics_file, read_statistics_file
from lit_knn.reference import ReferenceSet

Source = str | os.PathLike[str] | Tensor | np.ndarray | ReferenceSet
"""Images: a path that `lit-knn prepare` or `Arrays` reads; uint8 (N, C, H, W); or float (N, *shape) in model space."""


def score(
    samples: Source | Sequence[Source] | Mapping[str, Source],
    reference: Source | Sequence[Source],
    metrics: str | Sequence[str] | None = None,
    held_out: Source | None = None,
    options: ScoreOptions | None = None,
) -> list[Row]:
    """Compare samples with data, and return a row for each set of samples, metric and reference.

    A row has `samples`, `metric`, `value`, `standard_error` ("" if not known), `features`, `images`, `reference`,
    `reference_images`, how `pixels` and `reference_pixels` became what is compared, and the one of its `options` that
    is not the default ("" if there is none).

    Args:
        samples: images; several in a list, or by name.
        reference: images of the data, or a file of published statistics (`mu` and `sigma`), with which only
            Fréchet distances are measured; or both in a list.
        metrics: names such as "fid,kid" or ["fid", "kid"], see `lit_knn.metrics.score_options.METRICS`; None for a
            Fréchet distance and, with images of the data, KID, precision, recall and memorisation.
        held_out: images that no training saw, for C_T.
        options: see `ScoreOptions`.
    """
    options = options or ScoreOptions()
    names = None if metrics is None else checked_metrics(metrics)
    streams = _streams(samples, options.floats_as_is)
    data = _data(reference, held_out, options.floats_as_is)

    scorer = Scorer(data, names, options, streams[0].shape)
    for stream in streams:
        scorer.check(stream)

    rows: list[Row] = []
    for stream in streams:
        rows += scorer.rows(stream)
    return rows


def add_statistics(data: ScoreData, path: str | os.PathLike[str]) -> None:
    """Read published statistics into `data`, and print a line that says what is used."""
    statistics, unused = read_statistics_file(path)
    data.statistics[os.fspath(path)] = statistics
    about = f"{os.fspath(path)}: mean and covariance of {len(statistics.mean):,} features"
    say(f"{about}; not used: {', '.join(unused)}" if unused else about)


def _streams(
    samples: Source | Sequence[Source] | Mapping[str, Source], floats_as_is: bool
) -> list[ImageStream]:
    """Open all sets of samples."""
    if isinstance(samples, Mapping):
        by_name = dict(samples)
    else:
        by_name = {}
        for number, source in enumerate(_as_list(samples), start=1):
            by_name[_name(source, f"samples {number}")] = source
    if not by_name:
        raise InputError("score: there are no samples")

    streams = []
    for name, source in by_name.items():
        if isinstance(source, (str, os.PathLike)):
            stream = stream_of_path(source, floats_as_is)
            streams.append(replace(stream, name=name))
        else:
            streams.append(stream_of_set(_set_of(source, floats_as_is, name), name))
    return streams


def _data(
    reference: Source | Sequence[Source], held_out: Source | None, floats_as_is: bool
) -> ScoreData:
    """Read what samples are compared with."""
    data = ScoreData()
    for source in _as_list(reference):
        if isinstance(source, (str, os.PathLike)) and is_statistics_file(source):
            add_statistics(data, source)
        elif data.images is not None:
            rule = "the reference is one set of images, and any number of files of statistics"
            raise InputError(f"score: {rule}")
        else:
            data.name = _name(source, "reference")
            data.images = _set_of(source, floats_as_is, data.name)

    if held_out is not None:
        data.held_out = _set_of(held_out, floats_as_is, "held_out")
    return data


def _as_list(sources: Source | Sequence[Source]) -> Sequence[Source]:
    """Return sources as a list, also a single one."""
    return sources if isinstance(sources, (list, tuple)) else [sources]  # type: ignore[list-item]


def _name(source: Source, otherwise: str) -> str:
    """Return the path of a source, or another name."""
    return os.fspath(source) if isinstance(source, (str, os.PathLike)) else otherwise


def _set_of(source: Source, floats_as_is: bool, name: str) -> ReferenceSet:
    """Return images as a reference set; an error names them by `name`."""
    if isinstance(source, ReferenceSet):
        return source
    if isinstance(source, (str, os.PathLike)):
        return reference_from(source, floats_as_is=floats_as_is)

    images = ReferenceSet(source)
    doubt = "" if floats_as_is else doubt_about(images.images)
    if doubt:
        advice = "give uint8, or floats in [-1, 1], or set floats_as_is"
        raise InputError(f"{name}: {doubt}: {advice} if these values are meant")
    return images
