"""Measures what a run on a prepared file holds in memory, in a process of its own whose heap nothing else has used."""

from pathlib import Path

from lit_knn.common.memory import process_bytes
from lit_knn.data import Prepared
from lit_knn.reference import ReferenceSet


def main(rank, ranks, folder, how):
    """Use all of `how`, a prepared file of black images, and write the bytes that this took to the file `growth`."""
    before = process_bytes("RssAnon")
    data = Prepared(how, batch_size=1000)
    data.setup("fit")
    for _, (x, _) in zip(range(20), data.train_dataloader(), strict=False):
        assert (x == -1).all()
    data.reference.fingerprint()
    assert isinstance(data.reference, ReferenceSet)
    grown = process_bytes("RssAnon") - before
    Path(folder, "growth").write_text(str(grown))
