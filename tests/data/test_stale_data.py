"""Nothing that was computed from other data, weights or options is taken from a cache or a file."""

import hashlib
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

from lit_knn.data import Prepared
from lit_knn.data.prepared_writer import prepare
from lit_knn.index import FaissIndex
from lit_knn.metrics import InceptionV3, Pixels
from lit_knn.metrics.fidelity_measure import FidelityMeasure
from lit_knn.reference import ReferenceSet
from lit_knn.reference.classes import classes_of
from tests.image_files import image_folder


def images(n=12, seed=0, side=4):
    return torch.randint(
        0, 256, (n, 1, side, side), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


def sha256(pictures):
    return hashlib.sha256(pictures.numpy()).hexdigest()


def test_fingerprints_tell_images_shape_type_and_mirroring():
    base = images(5000, side=2)
    last = base.clone()
    last[-1, 0, 1, 1] ^= 1
    sets = [
        ReferenceSet(x, hflip=flip) for x in (base, last, base.float()) for flip in (False, True)
    ]
    sets += [ReferenceSet(base.reshape(5000, 1, 1, 4)), ReferenceSet(base.reshape(2500, 2, 2, 2))]
    sets += [ReferenceSet(base, sha256="0" * 64), ReferenceSet(base, sha256="1" * 64)]
    assert len({reference.fingerprint() for reference in sets}) == len(sets)
    assert (
        ReferenceSet(base).fingerprint()
        == ReferenceSet(base.clone(), sha256=sha256(base)).fingerprint()
    )


def test_shards_of_prepared_file_have_their_own_fingerprints(tmp_path):
    path = tmp_path / "x.npy"
    description = prepare(image_folder(tmp_path / "source", 10), path, block_images=3)
    whole = Prepared(str(path))
    whole.setup()
    # The hash of the description names the file; otherwise each start would read all of it.
    assert whole.reference._sha256 == description.sha256 == sha256(whole.reference.images)

    def shard(rank, ranks):
        data = Prepared(str(path), sharded=True)
        data.trainer = SimpleNamespace(global_rank=rank, world_size=ranks)
        with patch("lit_knn.data.base.rank_and_size", lambda: (rank, ranks)):
            data.setup()
        return data.reference.local

    shards = [shard(rank, ranks) for rank, ranks in ((0, 3), (1, 3), (2, 3), (0, 1), (0, 2))]
    assert [part.labels.tolist() for part in shards[:3]] == [[0, 0, 0], [1, 1, 2], [2, 2, 3, 3]]
    assert torch.equal(torch.cat([part.images for part in shards[:3]]), whole.reference.images)
    assert len({part.fingerprint() for part in shards}) == len(shards)
    assert shard(1, 3).fingerprint() == shards[1].fingerprint()


@pytest.mark.filterwarnings("ignore:.* images are few")
def test_classes_have_fingerprints_and_indexes_of_their_own(tmp_path):
    def made(pictures):
        index = FaissIndex("IVF2,Flat", nprobe=2, cache_dir=str(tmp_path))
        return ReferenceSet(pictures, index, labels=torch.arange(12) % 2, sha256=sha256(pictures))

    whole, other = made(images()), made(images(seed=1))
    parts = [*classes_of(whole).values(), *classes_of(other).values()]
    assert len({part.fingerprint() for part in (whole, other, *parts)}) == 6
    assert classes_of(made(images()))[1].fingerprint() == classes_of(whole)[1].fingerprint()
    for part in parts:
        # An index of another class would find other images, at other distances.
        sq_dist, ids = part.search(part.gather(torch.arange(6)), 1)
        assert ids[:, 0].tolist() == list(range(6))
        assert sq_dist.max() < 1e-3


class OtherWeights(Pixels):
    """Other features under the same name."""

    def __call__(self, images):
        return 2 * super().__call__(images)[0], None

    def fingerprint(self):
        return "other weights"


def test_cached_statistics_of_other_weights_do_not_serve_kid(
    tmp_path,
):
    data = ReferenceSet(images(20))
    generated = [(torch.arange(20), ReferenceSet(images(20, seed=1)).gather(torch.arange(20)))]

    def measured(cache_dir, metrics=("kid",), extractor=Pixels):
        measure = FidelityMeasure(
            extractor(), extra_metrics=metrics, kid_subset_size=10, cache_dir=str(cache_dir)
        )
        measure.prepare(data, 20)
        return measure(data, generated, 20)

    assert "kid" not in measured(tmp_path / "shared", ())
    later = measured(tmp_path / "shared")
    assert later == measured(tmp_path / "fresh") == measured(tmp_path / "shared")
    shared, fresh = (
        measured(tmp_path / name, extractor=OtherWeights) for name in ("shared", "other")
    )
    assert shared == fresh


def test_the_fingerprint_of_inception_is_that_of_its_weights(tmp_path, monkeypatch):
    monkeypatch.setattr(FeatureExtractorInceptionV3, "load_state_dict", lambda self, state: None)
    prints = []
    for number in (0, 1, 1):
        torch.save({"fc.bias": torch.tensor(number)}, tmp_path / "weights.pth")
        extractor = InceptionV3(tmp_path / "weights.pth")
        extractor.load((3, 8, 8), "cpu")
        prints.append(extractor.fingerprint())
    assert prints[0] != prints[1] == prints[2]
