"""`lit-knn score SAMPLES… --data …` compares samples of any program with any data: docs/score.md."""

import argparse
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import torch
from jsonargparse import Namespace
from pytorch_lightning import LightningDataModule

from lit_knn.commands.cli import make_cli  # noqa: F401  # It lets the parser find data modules by their names.
from lit_knn.commands.cli.command import quiet
from lit_knn.commands.cli.messages import refusal
from lit_knn.commands.cli.parser import Parser
from lit_knn.commands.score_files import (
    keep_rows,
    picture_path,
    save_pairs,
    shown_table,
    table_path,
)
from lit_knn.common.errors import InputError
from lit_knn.common.tables import Row
from lit_knn.data import ReferenceDataModule
from lit_knn.data.image_stream import stream_of_path
from lit_knn.metrics import ScoreOptions
from lit_knn.metrics.score_data import ScoreData
from lit_knn.metrics.score_options import FEATURES, METRICS, checked_metrics
from lit_knn.metrics.scorer import Scorer
from lit_knn.metrics.scoring import add_statistics
from lit_knn.metrics.statistics_files import is_statistics_file

DESCRIPTION = """Compare samples of any program with any data.

Samples are folders, zips, tars, .npz files (arr_0 of guided-diffusion), .npy files or prepared files. An .npz file that
has mu and sigma, or its address, is a reference of published statistics, with which Fréchet distances are measured.
The images of the reference are those of a data module, --data. OUTPUT gets a table, scores.csv, and pictures of the
samples that are most like images of the reference. See docs/score.md."""
EXAMPLES = """examples:
  lit-knn score samples/ --data CIFAR10 --metrics fid,is,kid,pr,fd_dinov2,memorisation
  lit-knn score a.npz b.zip cifar10-32x32.npz --data Images --data.path photos.npy --output scores.csv"""
PAIRS = 32  # in a picture


def main(args: Sequence[str]) -> None:
    """Run one command line."""
    with quiet():
        try:
            parser = _parser()
            parsed = parser.parse_args(list(args))
            data = parser.instantiate(parsed).data
        except argparse.ArgumentError as error:
            raise refusal(error) from error
        score_paths(parsed, data)


def score_paths(options: Namespace, data_module: object) -> None:
    """Score all samples, print the table, and write it and the pictures.

    Args:
        options: the parsed command line.
        data_module: the data, or None.
    """
    samples, statistics = [], []
    for path in options.samples:
        if is_statistics_file(path):
            statistics.append(path)
        else:
            samples.append(path)
    if not samples:
        raise InputError("samples: there are only statistics; name a folder or file of images, too")

    names = None if options.metrics is None else checked_metrics(options.metrics)
    how = _score_options(options)
    table = table_path(Path(options.output))

    streams = [stream_of_path(path, how.floats_as_is) for path in samples]
    data = _data(data_module, str(how.device))
    for path in statistics:
        add_statistics(data, path)
    scorer = Scorer(data, names, how, streams[0].shape)
    for stream in streams:
        scorer.check(stream)

    rows: list[Row] = []
    try:
        for stream in streams:
            new = scorer.rows(stream)
            rows += new
            keep_rows(table, new)
            if scorer.pairs is not None:
                save_pairs(picture_path(table, stream.name), *scorer.pairs)
    finally:
        # A failed write, or samples that cannot be read, must not lose the rows that were measured.
        if rows:
            print(shown_table(rows))
    print(f"Table: {table}")


def _score_options(options: Namespace) -> ScoreOptions:
    """Return the options of `score` that the parsed command line has."""
    names = [field.name for field in fields(ScoreOptions) if field.name in options]
    return ScoreOptions(**{name: options[name] for name in names}, pairs=PAIRS)


def _data(module: object, device: str) -> ScoreData:
    """Load the images of a data module; latents count as the images that they encode."""
    if module is None:
        return ScoreData()
    if not isinstance(module, ReferenceDataModule):
        raise InputError(f"--data: must be a ReferenceDataModule, got {type(module).__name__}")

    module.prepare_data()
    module.setup("validate")
    images = module.image_reference or module.reference
    held_out = module.held_out_image_reference or module.held_out_reference
    assert images is not None
    name = str(getattr(module, "path", None) or type(module).__name__)
    return ScoreData(name, images.to(device), held_out)


def _parser() -> Parser:
    """Return the parser of this command."""
    parser = Parser(
        prog="lit-knn score",
        usage="%(prog)s SAMPLES [SAMPLES …] [STATISTICS …] [--data DATA] [--OPTION VALUE ...]",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        exit_on_error=False,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("samples", nargs="+", type=str, help="samples, and perhaps files of statistics")
    add("--metrics", type=str | None, default=None, help=METRICS_HELP)
    add("--output", type=str, default="scores", help="a folder, or the path of a table, FILE.csv")
    add("--features", type=str | None, default=None, help=FEATURES_HELP)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    add("--device", type=str, default=device, help="cpu, cuda, …; by default a GPU if there is one")
    parser.add_class_arguments(ScoreOptions, skip={"features", "device", "pairs", "seed"})
    parser.set_defaults(cache_dir="runs/fidelity_cache")
    parser.add_lightning_class_args(LightningDataModule, "data", subclass_mode=True, required=False)
    return parser


METRICS_HELP = f"""names with commas between: {", ".join(METRICS)}; fd is the
Fréchet distance of FEATURES, pr precision and recall, dc density and coverage,
memorisation the share of copies, AuthPct and, with --data.held_out, C_T; by default fid, kid, pr and memorisation, or
fid alone without --data"""
FEATURES_HELP = f"""what kid, pr, dc, AuthPct and C_T compare: {", ".join(FEATURES)}; by default the features of the
first Fréchet distance in METRICS, otherwise Inception's; pixels for memorisation alone, up to 64x64"""
