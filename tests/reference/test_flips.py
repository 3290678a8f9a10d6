"""Horizontal flips: the configs that have them, and the images without their mirror images, for FID."""

import pytest
import torch

from lit_knn.reference import ReferenceSet
from lit_knn.reference.sharded import ShardedReferenceSet
from tests.config_files import CONFIGS, RUNS, resolved

FLIPPED = ["flow/cifar10.yaml", "table1/ict.yaml", "table1/ict_stf.yaml", "table1/ict_knn.yaml", "figure4/cifar10.yaml"]


def flips(path):
    return (resolved(path)["data"].get("init_args") or {}).get("hflip", False)


def test_digits_and_the_figures_of_estimators_are_not_flipped():
    assert sorted(str(path.relative_to(CONFIGS)) for path in RUNS if flips(path)) == sorted(FLIPPED)
    assert len([path for path in RUNS if resolved(path)["data"]["class_path"].endswith("Digits")]) >= 9


@pytest.mark.parametrize(("kind", "ranks"), [(ReferenceSet, 2), (ShardedReferenceSet, 1)])
def test_a_set_with_flips_gives_its_images_without_their_mirror_images_too(kind, ranks):
    images = torch.randint(0, 256, (7, 1, 4, 4), dtype=torch.uint8)
    flipped, plain = (kind(images, hflip=hflip) for hflip in (True, False))
    for rank in range(ranks):
        ours, theirs = (list(s.share(rank, ranks, 3, mirrored=False)) for s in (flipped, plain))
        assert len(ours) == len(theirs) > 0
        for (ids, x), (other_ids, other) in zip(ours, theirs, strict=True):
            assert torch.equal(ids, other_ids)
            assert torch.equal(x, other)
    assert len(torch.cat([x for _, x in flipped.chunks(3)])) == 14
    assert len(torch.cat([x for _, x in flipped.chunks(3, mirrored=False)])) == 7
    assert flipped.fingerprint(mirrored=False) == plain.fingerprint() == plain.fingerprint(mirrored=False)
    assert flipped.fingerprint() != plain.fingerprint()
