"""Runs the Triton kernels of gathered images in the interpreter: `python -m tests.interpreted_kernels CASES RESULTS`.

Triton reads TRITON_INTERPRET when it is imported, so tests run this in a process of its own.
"""

import sys

import torch

from lit_knn.reference import gathered_kernels


def placed(images, behind):
    """Put `behind` rows in front of the images. They take no memory, because nothing writes them."""
    if behind == 0:
        return images
    whole = images.new_empty(behind + len(images), images.shape[1])
    whole[behind:] = images
    return whole


def main(cases, results):
    found = []
    for case in torch.load(cases, weights_only=True):
        images = placed(case["images"].flatten(1), case["behind"]), case["ids"] + case["behind"], case["used"]
        sq_dist = gathered_kernels.sq_dist(*images, case["z"].flatten(1), case["width"])
        source = None if case["source"] is None else case["source"].flatten(1)
        mean = gathered_kernels.mean(*images, case["weights"], source, case["width"])
        found.append({"sq_dist": sq_dist, "mean": mean})
    torch.save(found, results)


if __name__ == "__main__":
    main(*sys.argv[1:])
