"""Horizontal flips in Table 1's training: items and posterior use the mirrored set, FID's statistics do not."""

import numpy as np
import pytest
import torch

from lit_knn.estimators import Exact
from lit_knn.reference import ReferenceSet
from lit_knn.reference.sharded import ShardedReferenceSet
from main import make_cli
from tests.config_files import CONFIGS, RUNS, resolved
from tests.image_files import write_cifar10

FLIPPED = ["flow/cifar10.yaml", "table1/ict.yaml", "table1/ict_stf.yaml", "table1/ict_knn.yaml", "figure4/cifar10.yaml"]


def flips(path):
    return (resolved(path)["data"].get("init_args") or {}).get("hflip", False)


def test_digits_and_the_figures_of_estimators_are_not_flipped():
    assert sorted(str(path.relative_to(CONFIGS)) for path in RUNS if flips(path)) == sorted(FLIPPED)
    assert len([path for path in RUNS if resolved(path)["data"]["class_path"].endswith("Digits")]) >= 9


@pytest.mark.parametrize("name", ["flow/cifar10.yaml", "table1/ict_knn.yaml"])
def test_items_and_posterior_are_of_the_set_of_both_sides(name, tmp_path, monkeypatch):
    # Ten images replace CIFAR-10; their mirror images are made by hand.
    pixels = write_cifar10(tmp_path, monkeypatch)
    both = torch.from_numpy(np.concatenate([pixels, pixels[..., ::-1]]).astype(np.float64) / 127.5 - 1)
    cli = make_cli(
        [
            *("-c", str(CONFIGS / name), "--model.net", str(CONFIGS / "models" / "unet.yaml")),
            *("--data.root", str(tmp_path), "--data.download", "false", "--data.batch_size", "4"),
            *("--trainer.accelerator", "cpu", "--trainer.logger", "false"),
        ],
        run=False,
    )
    data = cli.datamodule
    data.setup("fit")
    # An epoch has each image and each mirror image once, in random order.
    items = torch.cat([x for x, _ in data.train_dataloader()]).double()
    matches = (items[:, None] - both).abs().flatten(2).amax(2) < 1e-6
    assert matches.sum(1).tolist() == [1] * 20
    assert sorted(matches.int().argmax(1).tolist()) == list(range(20))

    # The expected posterior mean is enumerated over the set that items are drawn from.
    def enumerated(x, z, t):
        weights = (-(z[:, None] - x).square().flatten(2).sum(2) / (2 * t * t)).softmax(1)
        return torch.einsum("bn,nchw->bchw", weights, x)

    for t in (5.0, 20.0):
        z = items[:6] + t * torch.randn(6, 3, 32, 32, dtype=torch.float64)
        mean = Exact().bind(data.reference).posterior_mean(z.float(), t)
        assert (mean - enumerated(both, z, t)).square().mean() < 1e-10
        assert (mean - enumerated(both[:10], z, t)).square().mean() > 1e-3


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
