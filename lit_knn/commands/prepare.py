"""`lit-knn prepare SOURCE OUT` writes images into a file for runs on data larger than memory."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from lit_knn.common.errors import InputError
from lit_knn.data.prepare_options import PrepareOptions
from lit_knn.data.prepared import Description, npy_path, skipped_path, verify
from lit_knn.data.prepared_writer import prepare

EPILOG = """
SOURCE is a .zip file or a folder of image files, in subfolders too, in the order of their names,
with their labels in dataset.json at the root if there is one (the layout of EDM's data sets); or a
folder that has cifar-10-batches-py. PNG, JPEG, WebP, BMP, GIF and TIFF are read. One line counts
the image files that are left out: those of other formats, and those of several frames. A photo is
turned as its Exif tag says.

Only one block of images is in memory at a time. After an interruption the same command goes on
where it stopped. All bad files are named in one pass, and what is done is kept: without them, or
with --skip-bad, the command goes on.

OUT appears when it is complete: pixels, uint8 (N, C, H, W), which every tool reads, and beside it a
.json with the labels, names of the classes, origin and a hash of all pixels. --verify FILE checks it.

CelebA, 202,599 images (img_align_celeba.zip of the data set's own page, as it is or unpacked), 2.5 GB:
  lit-knn prepare img_align_celeba.zip data/celeba64.npy --size 64 --center-crop
ImageNet, 1,281,167 images with labels (the folder train/ of 1,000 folders n01440764 ... of .JPEG files), 15.7 GB:
  mkdir train; cd train; tar xf ../ILSVRC2012_img_train.tar
  for f in n*.tar; do mkdir ${f%.tar}; tar xf $f -C ${f%.tar}; rm $f; done; cd ..
  lit-knn prepare train data/imagenet64.npy --size 64 --center-crop --rgb --labels-from-folders
CIFAR-10 (data has cifar-10-batches-py), 154 MB:
  lit-knn prepare data data/cifar10.npy
Use it with --data Prepared --data.path OUT, or configs/data/prepared.yaml.

With --autoencoder OUT gets latents: those of all N images, and then, in rows N to 2N - 1, those of all
mirrored images, for runs with hflip. SOURCE is a file of an earlier lit-knn prepare, or anything else, which is then
prepared first, to NAME.images.npy for NAME.npy. The .json beside OUT names these images and the
autoencoder, so that --data Images --data.path OUT decodes samples and compares them with the images:
  lit-knn prepare data/imagenet256.npy data/latents.npy --autoencoder hf://stabilityai/sd-vae-ft-ema --half
"""

SOURCES = "folder or .zip of image files; .tar, 'a-{00..09}.tar' or folder of tars, as of "
SOURCES += (
    "WebDataset; .parquet, folder of them (its split train, if their names tell splits) or of "
)
SOURCES += "save_to_disk, or hf://user/name, read by Hugging Face datasets; LMDB; .npz or .npy of "
SOURCES += "pixels, such as ADM's samples, or a prepared file"


def main(args: Sequence[str] | None = None) -> None:
    """Run `lit-knn prepare` with the arguments of a command line; raise InputError for bad input."""
    parser = _parser()
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

    _refuse_options_of_latents(options)
    made = prepare(options.source, out, changes, options.workers, skip_bad=options.skip_bad)
    print(_summary(out, made))


def _parser() -> argparse.ArgumentParser:
    """Return the parser of this command: what is read and written; the options of images and of latents follow."""
    about = "Write images, changed as asked, to an .npy file with a .json beside it."
    parser = argparse.ArgumentParser(
        "lit-knn prepare",
        description=about,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("source", metavar="SOURCE", nargs="?", help=SOURCES)
    add("out", metavar="OUT", nargs="?", help="the .npy file to write")

    verifies = "compare all pixels of a prepared FILE with its hash, and end"
    add("--verify", metavar="FILE", help=verifies)
    _add_image_options(parser)
    _add_latent_options(parser)
    return parser


def _add_image_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the images: how they are changed, their labels, and bad files."""
    add = parser.add_argument
    add("--size", type=int, metavar="S", help="resize to S x S with antialiasing (Lanczos)")
    crops = "first cut the largest square out of the middle"
    add("--center-crop", action="store_true", help=crops)

    makes_rgb = "make grayscale, CMYK and transparent images RGB; without it they are refused, "
    makes_rgb += "but grayscale alone is read"
    add("--rgb", action="store_true", help=makes_rgb)
    ground = "with --rgb, the colour that shows through transparent parts, such as black or #808080"
    add("--background", default="white", metavar="COLOUR", help=f"{ground} (default: white)")

    labels = "label each image with the place of its folder among all, sorted by name, from 0, and "
    labels += "keep the names; each image must lie directly in the folder of its class"
    add("--labels-from-folders", action="store_true", help=labels)

    key = "the column of a table, of numbers or texts, or the key in a tar's .json files, that has "
    key += "the labels; by default a table's ClassLabel or column label, and a tar's .cls files"
    add("--label-key", metavar="NAME", help=key)

    skips = "leave out files that are damaged or cannot be images of this set, and write their "
    skips += "names to a .skipped.txt beside OUT"
    add("--skip-bad", action="store_true", help=skips)
    add("--workers", type=int, metavar="W", help="threads that decode; default: one for each CPU")


def _add_latent_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of latents, which go with --autoencoder."""
    add = parser.add_argument
    encodes = "write latents by an AutoencoderKL of diffusers: a folder of save_pretrained, or "
    encodes += "hf://user/name"
    add("--autoencoder", metavar="PATH", help=encodes)
    draws = "with --autoencoder, encode by a draw from the posterior, which this number and the "
    draws += "image fix; default: its mean"
    add("--draw-seed", type=int, metavar="N", help=draws)
    scales = "with --autoencoder, a further factor of the latents (default: 1)"
    add("--latent-scale", type=float, default=1.0, metavar="F", help=scales)
    add("--half", action="store_true", help="with --autoencoder, write float16, not float32")
    mirrors = "with --autoencoder, leave out the mirrored images, in half the time and space"
    add("--no-mirrored", action="store_true", help=mirrors)


def _refuse_options_of_latents(options: argparse.Namespace) -> None:
    """Refuse options that go with --autoencoder alone."""
    defaults = {"draw_seed": None, "latent_scale": 1.0, "half": False, "no_mirrored": False}
    for name, default in defaults.items():
        if getattr(options, name) != default:
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
