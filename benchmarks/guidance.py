"""Guidance on the digits: how often a classifier sees the class that was asked for, and the distance to the data.

lit-knn fit -c configs/table2/digits_conditional.yaml --model.label_dropout 0.1
python -m benchmarks.guidance runs/table2_digits_conditional/knn_0
"""

import argparse

import numpy as np
import torch
from sklearn.svm import SVC

import lit_knn
from benchmarks.common import markdown
from lit_knn.data.digits import read_digits
from lit_knn.metrics import Pixels, frechet_distance
from lit_knn.reference import ReferenceSet

SAMPLES, BATCH = 2000, 250
WEIGHTS = (0.0, 1.0, 2.0, 3.0)


def main() -> None:
    """Print the table of one run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="folder of the run")
    model = lit_knn.load(parser.parse_args().run)
    images, labels = read_digits()
    reference = ReferenceSet(images)
    pixels = reference.gather(torch.arange(reference.N)).flatten(1).numpy()
    classifier = SVC(gamma="scale", C=10).fit(pixels[::2], labels[::2])
    print(
        f"The classifier is right on {classifier.score(pixels[1::2], labels[1::2]):.1%} of digits that it has not seen."
    )
    wanted = torch.arange(SAMPLES) % 10
    table = [["w", "samples of the class that was asked for", "fd_pixels", "spread within a class"]]
    for w in WEIGHTS:
        parts = torch.arange(SAMPLES).split(BATCH)
        samples = torch.cat([model.sample(part, class_label=wanted[part], guidance=w) for part in parts])
        share = (classifier.predict(samples.flatten(1).numpy()) == wanted.numpy()).mean()
        distance = frechet_distance(samples, reference, Pixels())
        spread = np.mean([samples[wanted == c].std(0).square().sum().sqrt().item() for c in range(10)])
        table.append([f"{w:g}", f"{share:.1%}", f"{distance:.3f}", f"{spread:.2f}"])
    print(markdown(table))


if __name__ == "__main__":
    main()
