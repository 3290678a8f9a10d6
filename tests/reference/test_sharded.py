"""A reference set split over ranks gives the same results as the whole set, with less memory per rank."""

from socket import gethostname

import pytest
import torch

from lit_knn.estimators import DrawingEstimator
from lit_knn.index import FaissIndex, TorchIndex
from lit_knn.reference import ReferenceSet
from lit_knn.reference.principal import projection_of
from lit_knn.reference.sharded import ShardedReferenceSet
from tests.ranks import run_ranks
from tests.sharded_probe import ESTIMATORS, SHAPES, K, N, answers, images, latents
from tests.toys import all_warped


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    codes, _, errors = run_ranks("tests.sharded_probe", folder, "well", request.param)
    assert codes == [0] * request.param, errors
    return [torch.load(folder / f"rank_{rank}.pt") for rank in range(request.param)]


def whole(setting, index=None):
    return ReferenceSet(images(setting), index, hflip=setting == "mirrored", labels=torch.arange(N))


@pytest.mark.parametrize("setting", SHAPES)
def test_answers_are_those_of_the_whole_set(ranks, setting):
    for rank, report in enumerate(ranks):
        expected, seen = answers(whole(setting), setting, rank), report[setting]
        for one, other in zip(expected["found"], seen["found"], strict=True):
            assert all(map(torch.equal, one, other))
        for name in ("gathered", "located", "chunks", "labels", "classes", "sq_error"):
            assert torch.equal(expected[name], seen[name])
        assert torch.allclose(expected["mean"], seen["mean"], rtol=1e-6, atol=1e-7)
        assert (
            len(latents(setting, rank)[0])
            == len(seen["means"]["Exact, t=0.5"])
            == (0 if rank == 1 else 3 + rank)
        )
        for name, mean in expected["means"].items():
            tolerance = 1e-5 if name.startswith(("Exact", "Wiener")) else 0.0
            if name.startswith("SubspaceKNN"):
                # Other numbers of threads round the components otherwise: 1e-6 of ‖y‖²/2t² = 100 at t = 0.5.
                tolerance = 1e-4
            assert torch.allclose(mean, seen["means"][name], rtol=tolerance, atol=tolerance), name


@pytest.mark.parametrize("setting", SHAPES)
def test_ranks_share_a_pass_over_all_images_and_none_waits(ranks, setting):
    pieces = [piece for report in ranks for piece in report[setting]["share"]]
    ids, x = (torch.cat(part) for part in zip(*pieces, strict=True))
    assert max(len(ids) for ids, _ in pieces) <= 10
    expected = whole(setting)
    assert torch.equal(ids.sort().values, torch.arange(expected.N))
    assert torch.equal(x, expected.gather(ids))
    # The shares are equal up to one image and its mirror image.
    counts = [sum(len(ids) for ids, _ in report[setting]["share"]) for report in ranks]
    assert max(counts) - min(counts) <= 2


def test_ranks_agree_on_the_whole_and_hold_their_parts(ranks):
    sq_dist, ids = whole("pixels", TorchIndex("float32")).search(latents("pixels", 0)[0], K)
    coordinates = projection_of(whole("pixels"), 4).coordinates
    others, B, d = len(ranks) - 1, 6, 48
    shares = [report["stored"][0] for report in ranks]
    assert sum(shares) == N
    assert max(shares) - min(shares) <= 1
    assert len({report["fingerprint"] for report in ranks}) == 1
    # An index is kept under the fingerprint of what it holds, with the mirror images or without them.
    assert len(set(ranks[0]["fingerprints"])) == 2
    for report, share in zip(ranks, shares, strict=True):
        assert (report["stored"], report["largest"]) == ((share, N, d * share), others)
        assert torch.allclose(sq_dist, report["TorchIndex"][0], rtol=1e-4)
        assert torch.equal(ids, report["TorchIndex"][1])
        assert torch.allclose(report["coordinates"], coordinates, rtol=1e-4, atol=1e-4)
        gather = (N - share) * 8 + others * share * d
        assert report["traffic"] == [
            others * B * (4 * d + 12 * 10),
            gather,
            others * B * (4 * d + 8 + 8 * d + 8),
        ]
        needs_all, too_many, too_few, no_classes = report["refusals"]
        assert (
            needs_all
            == "MonteCarlo needs the whole reference set on each rank, this one is sharded"
        )
        assert too_many.startswith(
            f"KNN: k={N + 1} is more than the {N} images of the reference set"
        )
        assert too_few == f"k=0 must be between 1 and the {N} images of the reference set"
        assert (
            no_classes
            == "a sharded reference set cannot be split by class: set data.sharded to false"
        )


@pytest.mark.parametrize(
    ("how", "codes", "message"),
    [
        ("error", [2, 2], f"error: rank 1 on {gethostname()} failed: MemoryError: no room"),
        ("killed", [2, -9], "error: another process ended while the reference set was made ready"),
        (
            "differing",
            [2, 2],
            "error: the shards differ: rank 0 has images (3,) torch.float32 hflip=False ",
        ),
        ("few", [2, 2], "error: data.sharded=true: 1 images are too few for 2 ranks"),
    ],
)
def test_a_rank_that_fails_stops_the_others(tmp_path, how, codes, message):
    seen, _, errors = run_ranks("tests.sharded_probe", tmp_path, how, 2)
    assert seen == codes, errors
    assert errors[0].splitlines()[-1].startswith(message)
    assert how != "killed" or "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME" in errors[0]


def test_one_process_alone_has_it_all():
    sharded = ShardedReferenceSet(images("pixels"), FaissIndex("Flat"), labels=torch.arange(N))
    expected, seen = answers(whole("pixels"), "pixels", 0), answers(sharded, "pixels", 0)
    for name, mean in expected["means"].items():
        assert torch.equal(mean, seen["means"][name]), name
    assert sharded.exchange.bytes_sent == 0


@pytest.mark.parametrize("name", ESTIMATORS)
def test_no_latents_on_any_rank_are_no_means(name):
    # This happens if augmentation warps every item of a batch. A single rank runs the same code as many.
    estimator, none = (
        ESTIMATORS[name]().bind(ShardedReferenceSet(images("pixels"))),
        torch.zeros(0, *SHAPES["pixels"]),
    )
    assert estimator.posterior_mean(none, 1.0, none).shape == none.shape
    if estimator.can_warp:
        assert estimator.warped_mean(none, 1.0, all_warped(none).warp, none).shape == none.shape
    if isinstance(estimator, DrawingEstimator):
        certificate = estimator.certified_mean(none, 1.0, none)
        assert [part.shape for part in certificate] == [none.shape, (0,), (0,), (0,)]
