"""Adapters of other people's estimators: their numbers, refusals and isolation, on checkouts that the tests write.

Where `LIT_KNN_CHECKOUTS` names the folder of real checkouts, their code is tested against ours.
"""

import copy
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lit_knn.common.errors import InputError
from lit_knn.estimators import Exact
from lit_knn.referee import adapters
from lit_knn.referee.adapters import KNNScore, STFTarget
from lit_knn.referee.adapters.adapter import Origin
from lit_knn.reference import ReferenceSet
from tests.toys import noisy, pixels

CHECKOUTS = os.environ.get("LIT_KNN_CHECKOUTS")
needs_checkouts = pytest.mark.skipif(CHECKOUTS is None, reason="LIT_KNN_CHECKOUTS names no folder of checkouts")
FOLDERS = {"KNNScore": "knn-score", "KNNScoreSTF": "knn-score", "STFTarget": "stf"}

# Code in the form of theirs, which computes exact means over the images that it gets.
SUMS = """
import torch
def softmax_mean(z, x, variance):
    sq_dist = torch.cdist(z.flatten(1).double(), x.flatten(1).double()).square()
    return (torch.softmax(-sq_dist / (2 * variance), 1) @ x.flatten(1).double()).reshape(z.shape).float()
"""
KNN_SCORE = """
import torch

class KNNDenoiser:
    def __init__(self, dataset, ref_size, k, gpu, quantize):
        from training.sums import softmax_mean
        self.mean = softmax_mean
        self.x = torch.stack([torch.as_tensor(image) for image, _ in dataset]) / 127.5 - 1
        assert len(self.x) == len(dataset)
    def __call__(self, z, sigma):
        return self.mean(z, self.x, sigma[:, None].double() ** 2)
"""
STF = """
from torch_utils import persistence

@persistence.persistent_class
class EDMLoss:
    def stf_targets(self, sigmas, z, batch):
        assert len(batch) == len(batch.unique(dim=0)) == 40
        return batch[: len(z)]
"""
# The adapter, its arguments, and where its module is.
FORMS = {
    "knn-score": (KNNScore, {"k": 60}, "training/denoisers.py", KNN_SCORE),
    "stf": (STFTarget, {"n": 40}, "training/loss.py", STF),
}


def git(folder, *args):
    names = ["-c", "user.name=me", "-c", "user.email=me@example.org"]
    return subprocess.run(["git", "-C", str(folder), *names, *args], check=True, capture_output=True, text=True).stdout


def checkout(folder, form, body=None, **changes):
    """Write code into a repository; return an adapter that expects its commit, made for this checkout."""
    adapter, arguments, module, code = FORMS[form]
    package = folder / module.partition("/")[0]
    for path, text in ((folder / module, body or code), (package / "sums.py", SUMS)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "theirs")
    origin = Origin("https://example.org/theirs", git(folder, "rev-parse", "HEAD").strip())
    return type(adapter.__name__, (adapter,), {"origin": origin})(str(folder), **arguments | changes)


def test_a_missing_or_other_checkout_is_refused_in_one_line(tmp_path):
    folder = tmp_path / "theirs"
    expected = r"; expected a checkout of https://github\.com/plai-group/knn-score at commit 3b4c85d5684e$"

    def refused(adapter, words):
        with pytest.raises(InputError, match=words) as told:
            adapter(str(folder), k=2)
        assert "\n" not in str(told.value)

    refused(KNNScore, f"checkout={folder} is no folder{expected}")
    folder.mkdir()
    refused(KNNScore, f"is no checkout .*{expected}")
    adapter = type(checkout(folder, "knn-score"))
    head = adapter.origin.commit
    refused(KNNScore, f"is {head}{expected}")
    (folder / "training/denoisers.py").write_text("x = 2\n")
    refused(adapter, f"is {head}-dirty; expected .* at commit {head[:12]}$")


@pytest.mark.parametrize("hflip", [False, True])
def test_others_get_all_images_and_the_noise_level_of_each_latent(hflip, tmp_path):
    own, t = ReferenceSet(pixels(60, (3, 6, 6)), hflip=hflip), torch.tensor([5, 0.002, 0.1, 1, 1, 1, 80])
    estimator = checkout(tmp_path, "knn-score").bind(own)
    z = noisy(own.gather(torch.arange(7) * 8), t)
    exact = Exact().bind(own).posterior_mean(z, t)
    torch.testing.assert_close(estimator.posterior_mean(z, t), exact, atol=1e-5, rtol=0)
    assert torch.equal(copy.deepcopy(estimator).posterior_mean(z, t), estimator.posterior_mean(z, t))
    assert estimator.posterior_mean(z.half(), t).dtype == torch.float16


def test_the_reference_batch_of_stf_begins_with_the_sources(tmp_path):
    own = ReferenceSet(pixels(200, (3, 6, 6)))
    x = 1.5 * own.gather(torch.arange(7))  # No images of the set.
    estimator = checkout(tmp_path, "stf").bind(own)
    assert torch.equal(estimator.posterior_mean(noisy(x, 1.0), 1.0, x_source=x), x)
    with pytest.raises(InputError, match="a batch of 41 needs n >= 41"):
        estimator.posterior_mean(torch.zeros(41, 3, 6, 6), 1.0, x_source=torch.zeros(41, 3, 6, 6))


def test_checkouts_with_the_same_names_do_not_meet_and_leave_no_trace(tmp_path):
    body = "class KNNDenoiser:\n    def __init__(self, data, k, **_): self.k = k\n"
    body += "    def __call__(self, z, sigma): return z * 0 + self.k + {}"
    third, fifth = (checkout(tmp_path / str(i), "knn-score", body.format(i), k=2) for i in (30, 50))
    estimators = {32: third, 52: fifth, 51: type(fifth)(fifth.checkout, k=1)}
    before = sys.path[:], dict(sys.modules)
    mine = sys.modules["training"] = object()
    try:
        own = ReferenceSet(pixels(60, (3, 6, 6)))
        for estimator in estimators.values():
            estimator.bind(own)
        for value, estimator in estimators.items():
            assert (estimator.posterior_mean(own.gather(torch.arange(7)), 1.0) == value).all()
        assert sys.modules["training"] is mine
    finally:
        del sys.modules["training"]
    assert (sys.path, dict(sys.modules)) == before


@needs_checkouts
@pytest.mark.parametrize("name", FOLDERS)
def test_their_code_runs_twice_alike_and_leaves_no_trace(name):
    own, t = ReferenceSet(pixels(120, (3, 6, 6))), torch.tensor([0.1, 0.5, 1.0, 1.0, 5.0, 60.0])
    x = own.gather(torch.arange(6))
    z = noisy(x, t)
    given, state, path, modules = z.clone(), torch.get_rng_state(), sys.path[:], set(sys.modules)
    python, cwd = random.getstate(), sorted(Path.cwd().iterdir())
    folder = Path(CHECKOUTS) / FOLDERS[name]
    estimator = getattr(adapters, name)(str(folder)).bind(own)
    generators = [torch.Generator().manual_seed(0) for _ in range(2)]
    mean, again = (estimator.posterior_mean(z, t, x_source=x, generator=generator) for generator in generators)
    assert torch.equal(mean, again)
    assert torch.equal(z, given)
    assert torch.equal(torch.get_rng_state(), state)
    assert (sys.path, random.getstate(), sorted(Path.cwd().iterdir())) == (path, python, cwd)
    scoped = {file.stem for file in folder.iterdir() if file.is_dir() or file.suffix == ".py"}
    assert not {name.partition(".")[0] for name in set(sys.modules) - modules} & scoped
