"""Convert a published EDM network to safetensors: `lit-knn convert IN.pkl OUT.safetensors`."""

import argparse
from collections.abc import Sequence

from lit_knn.sampling.loading import convert


def main(args: Sequence[str] | None = None) -> None:
    """Run `lit-knn convert` with the arguments of a command line."""
    about = "Convert a published EDM network (.pkl) to safetensors, executing none of its code."
    parser = argparse.ArgumentParser(prog="lit-knn convert", description=about)
    parser.add_argument("input", help="the published .pkl file")
    parser.add_argument("output", help="the .safetensors file to write; must not exist")
    options = parser.parse_args(args)
    print(f"{convert(options.input, options.output)!r} -> {options.output}")
