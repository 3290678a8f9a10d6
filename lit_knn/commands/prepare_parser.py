"""The options of `lit-knn prepare`, and its help."""

import argparse

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


def prepare_parser() -> argparse.ArgumentParser:
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
