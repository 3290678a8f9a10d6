"""Adapters of other people's estimators: refusals, isolation and processes on checkouts that the tests write.

Where `LIT_KNN_CHECKOUTS` names the folder of real checkouts, their code is tested against ours.
"""

import copy
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from lit_knn.common.errors import InputError
from lit_knn.estimators import Exact
from lit_knn.referee.adapters import (
    GoldDiff,
    KambEquivariant,
    KNNScore,
    KNNScoreSTF,
    PSPCEmpirical,
    PSPCSquare,
    STFTarget,
    StudioOptimal,
    StudioPCALocality,
    StudioWiener,
)
from lit_knn.referee.adapters.checkout import Origin
from lit_knn.referee.adapters.ddpm import OneLevelAdapter, OneLevelScheduler, alpha_bar
from lit_knn.reference import ReferenceSet
from lit_knn.theory.noise import VP
from tests.toys import noisy, pixels

CHECKOUTS = os.environ.get("LIT_KNN_CHECKOUTS")
needs_checkouts = pytest.mark.skipif(CHECKOUTS is None, reason="LIT_KNN_CHECKOUTS names no folder of checkouts")
FOLDERS = {
    KNNScore: "knn-score",
    KNNScoreSTF: "knn-score",
    STFTarget: "stf",
    StudioOptimal: "analytic-diffusion-studio",
    StudioWiener: "analytic-diffusion-studio",
    StudioPCALocality: "analytic-diffusion-studio",
    GoldDiff: "GoldDiff",
    PSPCEmpirical: "pspc",
    PSPCSquare: "pspc",
    KambEquivariant: "convolutional_diffusion",
}
ARGUMENTS = {PSPCSquare: {"patch_sizes": [6, 3]}, KambEquivariant: {"size": 3}}

# A denoiser in the form of the Studio's: the exact mean of x under z' = √ᾱ·x + √(1−ᾱ)·ε, from a data loader.
DENOISER = """
import torch
from diffusers import DDIMScheduler
from tqdm import tqdm
from local_diffusion.sums import softmax_mean

class OptimalDenoiser:
    def __init__(self, dataset, device, num_steps, params):
        self.scheduler = DDIMScheduler(beta_start=0.0001)
    def train(self, dataset):
        from local_diffusion.late import flattened
        self.x = torch.cat([flattened(part) for part in tqdm(dataset.dataloader, desc="x")])
    def denoise(self, latents, timestep):
        a = self.scheduler.alphas_cumprod[int(timestep)]
        return softmax_mean(latents, self.x, a)
"""
SUMS = """
import torch
def softmax_mean(z, x, a):
    sq_dist = torch.cdist(z.flatten(1).double(), a.sqrt() * x.double()).square()
    return (torch.softmax(-sq_dist / (2 * (1 - a)), 1) @ x.double()).reshape(z.shape).float()
"""
# A score in the form of Kamb and Ganguli's, of whole images, with beta as the time.
SCORE = """
from torch.utils.data import DataLoader
from utils.late import softmax_mean

class LocalEquivBordersScoreModule:
    def __init__(self, dataset, kernel_size, batch_size, schedule):
        self.schedule, self.trainloader = schedule, DataLoader(dataset, batch_size)
        self.local_module = type("Module", (), {})()
    def __call__(self, t, x, device):
        import torch
        b = self.schedule(t).double()
        images = torch.cat([images.flatten(1).to(device) for images, labels in self.trainloader])
        return -(x - (1 - b).sqrt() * softmax_mean(x, images, 1 - b)) / b
"""


def git(folder, *args):
    names = ["-c", "user.name=me", "-c", "user.email=me@example.org"]
    return subprocess.run(["git", "-C", str(folder), *names, *args], check=True, capture_output=True, text=True).stdout


def commit(folder, files, root="."):
    """Write files into a repository, and return their commit as an origin."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "theirs")
    return Origin("https://example.org/theirs", git(folder, "rev-parse", "HEAD").strip(), root)


def version_of(adapter, folder, files, root="."):
    """A subclass of an adapter that expects the files which this writes."""
    return type(adapter.__name__, (adapter,), {"origin": commit(folder, files, root)})


def studio(folder, denoiser=DENOISER):
    package = "src/local_diffusion"
    late = "def flattened(x):\n    return x.flatten(1)\n"
    files = {f"{package}/models/optimal.py": denoiser, f"{package}/sums.py": SUMS, f"{package}/late.py": late}
    return version_of(StudioOptimal, folder, files, "src")


def knn_score(folder, body):
    return version_of(KNNScore, folder, {"training/denoisers.py": body})


def reference(shape=(3, 6, 6), N=60):
    return ReferenceSet(pixels(N, shape))


def latents(reference, t, count=7):
    return noisy(reference.gather(torch.arange(count)), t)


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


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
    adapter = knn_score(folder, "x = 1\n")
    head = adapter.origin.commit
    refused(KNNScore, f"is {head}{expected}")
    adapter(str(folder), k=2)
    (folder / "training/denoisers.py").write_text("x = 2\n")
    refused(adapter, f"is {head}-dirty; expected .* at commit {head[:12]}$")


def test_levels_are_those_of_the_variance_preserving_process():
    times = torch.linspace(0.001, 1, 200, dtype=torch.float64)
    process = VP()
    levels = process.sigma(times)
    assert torch.allclose(alpha_bar(levels), process.scale(times).square(), rtol=1e-12)
    assert torch.allclose(alpha_bar(levels).sqrt() * levels, process.noise_std(times), rtol=1e-12)
    scheduler = OneLevelScheduler(beta_start=0.1)
    scale = scheduler.set_level(torch.tensor(3.0))
    assert scale**2 == pytest.approx(0.1)
    assert scheduler.alphas_cumprod[0] == pytest.approx(0.1)
    assert (scheduler.alphas_cumprod[0] * torch.ones(2)).dtype == torch.float32


def test_each_level_of_a_batch_is_computed_alone_in_small_groups():
    seen = []

    class Seen(OneLevelAdapter):
        needs_reference, rows = False, 3

        def __init__(self):
            pass

        def _make(self):
            pass

        def _mean_at(self, z, level):
            seen.append((level.item(), len(z)))
            return z * level

    z, t = torch.randn(7, 2), torch.tensor([1.0, 2, 1, 2, 1, 1, 3])
    assert torch.equal(Seen().posterior_mean(z, t), z * t[:, None])
    assert sorted(seen) == [(1.0, 1), (1.0, 3), (2.0, 2), (3.0, 1)]


@pytest.mark.parametrize("hflip", [False, True])
def test_a_denoiser_of_ddpm_gives_the_mean_of_our_process(hflip, tmp_path):
    own = ReferenceSet(pixels(60, (3, 6, 6)), hflip=hflip)
    estimator = studio(tmp_path)(str(tmp_path), 60).bind(own)
    z = latents(own, torch.tensor([0.002, 0.1, 0.5, 1, 2, 5, 80]))
    t = torch.tensor([0.002, 0.1, 0.5, 1, 2, 5, 80])
    exact = Exact().bind(own).posterior_mean(z, t)
    assert torch.allclose(estimator.posterior_mean(z, t), exact, atol=1e-5)
    assert torch.equal(copy.deepcopy(estimator).posterior_mean(z, t), estimator.posterior_mean(z, t))
    assert estimator.posterior_mean(z.half(), t).dtype == torch.float16


def test_a_score_of_ddpm_gives_the_mean_of_our_process(tmp_path):
    files = {"utils/idealscore.py": SCORE, "utils/late.py": SUMS}
    own, t = reference(), torch.tensor([0.002, 0.1, 0.5, 1, 2, 5, 80])
    estimator = version_of(KambEquivariant, tmp_path, files)(str(tmp_path), 3).bind(own)
    z = latents(own, t)
    exact = Exact().bind(own).posterior_mean(z, t)
    torch.testing.assert_close(estimator.posterior_mean(z, t), exact, atol=1e-4, rtol=0)


def theirs(adapter, **arguments):
    return adapter(str(Path(CHECKOUTS) / FOLDERS[adapter]), **ARGUMENTS.get(adapter, {}) | arguments)


def errors(estimator, own, t, count=60, **options):
    """The squared error per dimension of each latent."""
    x = own.gather(torch.arange(count))
    z = noisy(x, t)
    mean = estimator.bind(own).posterior_mean(z, t, x_source=x, generator=rng(), **options)
    return (mean.double() - Exact().bind(own).posterior_mean(z.double(), t)).square().flatten(1).mean(1)


@needs_checkouts
@pytest.mark.parametrize("adapter", FOLDERS, ids=lambda adapter: adapter.__name__)
def test_their_code_runs_twice_alike_and_leaves_no_trace(adapter):
    own = ReferenceSet(pixels(120, (3, 6, 6)))
    x = own.gather(torch.arange(5))
    t = torch.tensor([0.1, 0.5, 1.0, 1.0, 5.0])
    z = noisy(x, t)
    given, state, path, modules = z.clone(), torch.get_rng_state(), sys.path[:], set(sys.modules)
    python, cwd = random.getstate(), sorted(Path.cwd().iterdir())
    estimator = theirs(adapter).bind(own)
    first, again = (estimator.posterior_mean(z, t, x_source=x, generator=rng()) for _ in range(2))
    assert torch.equal(first, again)
    assert torch.equal(z, given)
    assert torch.equal(torch.get_rng_state(), state)
    assert (sys.path, random.getstate(), sorted(Path.cwd().iterdir())) == (path, python, cwd)
    scoped = {"training", "torch_utils", "dnnlib", "local_diffusion"}
    scoped |= {"methods", "services", "pspc", "data_src", "utils"}
    assert not {name.partition(".")[0] for name in set(sys.modules) - modules} & scoped


@needs_checkouts
@pytest.mark.parametrize("t", [0.1, 1.0, 5.0])
def test_their_exact_means_and_filter_are_ours(t):
    own = ReferenceSet(pixels(120, (3, 6, 6)))
    assert errors(theirs(PSPCEmpirical), own, t).max() < 1e-10
    assert errors(theirs(PSPCSquare), own, 60.0).max() < 1e-10
    assert errors(theirs(StudioOptimal, num_neighbors=120), own, t).max() < 1e-9
    x = own.gather(torch.arange(9))
    z = noisy(x, t)
    data = own.gather(torch.arange(120)).flatten(1).double().numpy()
    covariance = np.cov(data.T)
    gain = covariance @ np.linalg.inv(covariance + t**2 * np.eye(own.d))
    expected = data.mean(0) + (z.flatten(1).double().numpy() - data.mean(0)) @ gain.T
    found = theirs(StudioWiener).bind(own).posterior_mean(z, t).flatten(1)
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_two_checkouts_with_the_same_names_do_not_meet_and_leave_no_trace(tmp_path):
    body = "class KNNDenoiser:\n    def __init__(self, *a, **k): pass\n"
    body += "    def __call__(self, z, s, x=None): return z * 0 + {}"
    made = [knn_score(tmp_path / str(i), body.format(i))(str(tmp_path / str(i)), k=2) for i in (3, 5)]
    before = sys.path[:], dict(sys.modules)
    mine = sys.modules["training"] = object()
    try:
        own = reference()
        z = latents(own, 1.0)
        for estimator in made:
            estimator.bind(own)
        for value, estimator in zip((3, 5), made, strict=True):
            assert (estimator.posterior_mean(z, 1.0) == value).all()
        assert sys.modules["training"] is mine
    finally:
        del sys.modules["training"]
    assert (sys.path, dict(sys.modules)) == before
