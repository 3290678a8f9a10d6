"""Prepare images for runs larger than memory: `lit-knn prepare SOURCE OUT`, or `--verify FILE`."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from lit_knn.data.image_source import Options
from lit_knn.data.prepared import verify
from lit_knn.data.prepared_writer import prepare

EPILOG = """
SOURCE is a .zip file or a folder of PNG and JPEG files, in subfolders too, in the order of their names, with their
labels in dataset.json at the root if there is one (the layout of EDM's data sets); or a folder that has
cifar-10-batches-py. Only one block of images is in memory at a time. After an interruption the same command goes on
where it stopped. OUT appears when it is complete: pixels, uint8 (N, C, H, W), which every tool reads, and beside it a
.json with the labels, the names of the classes, the origin and a hash of all pixels. A run does not read them all;
--verify FILE does.

CelebA, 202,599 images (img_align_celeba.zip of the data set's own page, as it is or unpacked), 2.5 GB:
  lit-knn prepare img_align_celeba.zip data/celeba64.npy --size 64 --center-crop
ImageNet, 1,281,167 images with labels (the folder train/ of 1,000 folders n01440764 ... of .JPEG files), 15.7 GB:
  mkdir train; cd train; tar xf ../ILSVRC2012_img_train.tar
  for f in n*.tar; do mkdir ${f%.tar}; tar xf $f -C ${f%.tar}; rm $f; done; cd ..
  lit-knn prepare train data/imagenet64.npy --size 64 --center-crop --rgb --labels-from-folders
CIFAR-10 (data has cifar-10-batches-py), 154 MB:
  lit-knn prepare data data/cifar10.npy
Use it with --data Prepared --data.path OUT, or configs/data/prepared.yaml.
"""


def main(args: Sequence[str] | None = None) -> None:
    """Run one command line. Raises InputError for bad input."""
    about = "Write images, changed as asked, to an .npy file that runs read by page, with a .json beside it."
    kept = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("lit-knn prepare", description=about, epilog=EPILOG, formatter_class=kept)
    parser.add_argument("source", metavar="SOURCE", nargs="?", help=".zip file or folder")
    parser.add_argument("out", metavar="OUT", nargs="?", help="the .npy file to write")
    parser.add_argument("--verify", metavar="FILE", help="compare all pixels of a prepared FILE with its hash, and end")
    parser.add_argument("--size", type=int, metavar="S", help="resize to S x S with antialiasing (Lanczos)")
    parser.add_argument("--center-crop", action="store_true", help="first cut the largest square out of the middle")
    parser.add_argument("--rgb", action="store_true", help="make grayscale, CMYK and transparent images RGB")
    told = "label each image with the place of its folder among all, sorted by name, from 0, and keep the names; "
    told += "each image must lie directly in the folder of its class"
    parser.add_argument("--labels-from-folders", action="store_true", help=told)
    parser.add_argument("--workers", type=int, metavar="W", help="threads that decode; default: one for each CPU")
    options = parser.parse_args(args)
    if options.out is None if options.verify is None else options.source is not None:
        parser.error("give SOURCE and OUT, or --verify FILE alone")
    if options.verify is not None:
        found = verify(options.verify)
        print(f"{options.verify}: {found.shape[0]:,} images are what was prepared")
        return
    changes = Options(options.size, options.center_crop, options.rgb, options.labels_from_folders)
    made = prepare(options.source, options.out, changes, options.workers)
    N, channels, height, width = made.shape
    labels = "without" if made.labels is None else "with"
    size = Path(options.out).expanduser().stat().st_size / 1e9
    print(f"{options.out}: {N:,} images of {width}x{height}x{channels}, {labels} labels, {size:.2f} GB")
