"""`lit-knn prepare SOURCE OUT` writes images into a file for runs on data larger than memory."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from lit_knn.commands.prepare_parser import prepare_parser
from lit_knn.common.errors import InputError
from lit_knn.data.prepare_options import PrepareOptions
from lit_knn.data.prepared import Description, npy_path, skipped_path, verify
from lit_knn.data.prepared_writer import prepare


def main(args: Sequence[str] | None = None) -> None:
    """Run `lit-knn prepare` with the arguments of a command line; raise InputError for bad input."""
    parser = prepare_parser()
    options = parser.parse_args(args)
    # With --verify, neither SOURCE nor OUT may be given; without it, both must be.
    prepares = options.verify is None
    if (options.source is not None) != prepares or (options.out is not None) != prepares:
        parser.error("give SOURCE and OUT, or --verify FILE alone")

    if options.verify is not None:
        verified = verify(options.verify)
        items = "images" if verified.latents is None else "latents"
        print(f"{options.verify}: {verified.shape[0]:,} {items} are what was prepared")
        return

    changes = PrepareOptions(
        size=options.size,
        center_crop=options.center_crop,
        rgb=options.rgb,
        labels_from_folders=options.labels_from_folders,
        label_key=options.label_key,
        background=options.background,
    )
    out = npy_path(options.out)
    if options.autoencoder is not None:
        _prepare_latents(out, changes, options)
        return

    _refuse_options_of_latents(options, parser)
    made = prepare(options.source, out, changes, options.workers, skip_bad=options.skip_bad)
    print(_summary(out, made))


def _refuse_options_of_latents(
    options: argparse.Namespace, parser: argparse.ArgumentParser
) -> None:
    """Refuse options that go with --autoencoder alone."""
    for name in ("draw_seed", "latent_scale", "half", "no_mirrored"):
        if getattr(options, name) != parser.get_default(name):
            raise InputError(f"--{name.replace('_', '-')} goes with --autoencoder")


def _prepare_latents(out: Path, changes: PrepareOptions, options: argparse.Namespace) -> None:
    """Prepare the images, unless that is done, then write their latents, and print a line on each file.

    Args:
        out: the file of latents to write.
        changes: those made to each image.
        options: those of the command line.
    """
    # Images alone are prepared without these imports, which take seconds.
    from lit_knn.data.autoencoders import AutoencoderKL
    from lit_knn.data.latents_writer import check_options, prepare_latents

    images = Path(options.source).expanduser()
    is_plain_array = images.is_file() and not images.with_suffix(".json").exists()
    is_prepared = images.suffix == ".npy" and not is_plain_array
    if is_prepared and (changes != PrepareOptions() or options.skip_bad):
        raise InputError(f"{images} is prepared: options that change images are for other sources")

    # A wrong autoencoder, or a file of another one, is refused now, and not after hours of preparing images.
    coder = AutoencoderKL(options.autoencoder, options.draw_seed, options.latent_scale)
    coder.loaded()
    mirrored = not options.no_mirrored
    check_options(out, coder, options.half, mirrored)
    if not is_prepared:
        images = out.with_suffix(".images.npy")
        made = prepare(options.source, images, changes, options.workers, None, options.skip_bad)
        print(_summary(images, made))

    made = prepare_latents(images, out, coder, options.half, mirrored)
    assert made.latents is not None
    shape = "x".join(map(str, made.shape[1:]))
    which = ", those of mirrored images included" if mirrored else ""
    spread = f"standard deviation {made.latents['standard_deviation']:.3g}"
    print(f"{out}: {made.shape[0]:,} latents of {shape}{which}, {spread}, {_size(out)}")


def _summary(out: Path, made: Description) -> str:
    """Return a line on what the prepared file holds.

    Args:
        out: path of the file.
        made: its description.
    """
    N, channels, height, width = made.shape
    labels = "without" if made.labels is None else "with"
    held = f"{out}: {N:,} images of {width}x{height}x{channels}, {labels} labels, {_size(out)}"

    skipped = skipped_path(out)
    if not skipped.exists():
        return held
    number = len(skipped.read_text(encoding="utf-8").splitlines())
    return f"{held}; {number:,} bad files are left out, see {skipped.name}"


def _size(path: Path) -> str:
    """Return the size of a file in gigabytes."""
    return f"{path.stat().st_size / 1e9:.2f} GB"
