"""An estimator of one's own in eleven lines, wherever ours work; and what five wrong ways to write it get."""

import sys

import pytest
import torch

from lit_knn.common.errors import InputError
from lit_knn.estimators import ByClass, Estimator, Smoothed, Switched
from lit_knn.metrics import error_curve
from lit_knn.reference import ReferenceSet
from lit_knn.theory.posterior import posterior_mean
from main import main
from tests.toys import noisy, pixels

N, T = 60, 2.0
OWN = """
import torch
from lit_knn.estimators import Estimator
from lit_knn.theory.posterior import direct_sq_dist, unnormalised_log_likelihood

class Half(Estimator):
    def __init__(self, share: float = 0.5) -> None:
        self.share = share
    def _posterior_mean(self, z, t, x_source, generator):
        ids = torch.randperm(self.reference.N, generator=generator)[: int(self.share * self.reference.N)]
        x = self.reference.take(ids.expand(len(z), -1))
        weights = unnormalised_log_likelihood(direct_sq_dist(z, x), t).softmax(1)
        return torch.einsum("bn,bn...->b...", weights, x.double())
"""


@pytest.fixture
def half(tmp_path, monkeypatch):
    (tmp_path / "own_half.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    import own_half

    yield own_half.Half
    sys.modules.pop("own_half")


def reference(shape=(3, 6, 6)):
    return ReferenceSet(pixels(N, shape), labels=torch.arange(N) % 3)


def latents(made, B=6):
    x = made.gather(torch.arange(B))
    return noisy(x, T), x


def seeded():
    return torch.Generator().manual_seed(1)


def test_it_works_alone_by_class_and_inside_others(half):
    made = reference()
    z, _ = latents(made)
    images = made.gather(torch.arange(N))
    exact = posterior_mean(z, images, T).float()
    all_images = half(1.0).bind(made)
    torch.testing.assert_close(all_images.posterior_mean(z, T, generator=seeded()), exact, rtol=0, atol=1e-5)
    torch.testing.assert_close(all_images.score(z, T, generator=seeded()), (exact - z) / T**2, rtol=0, atol=1e-5)
    labels = torch.tensor([0, 1, 2, 2, 1, 0])
    found = ByClass(half(1.0)).bind(made).posterior_mean(z, T, labels=labels)
    for row, label in enumerate(labels.tolist()):
        own = posterior_mean(z[row : row + 1], images[label::3], T)[0].float()
        torch.testing.assert_close(found[row], own, rtol=0, atol=1e-5)
    switched = Switched(half(0.5), half(1.0), 1.0).bind(made)
    torch.testing.assert_close(switched.posterior_mean(z, T), exact, rtol=0, atol=1e-5)
    assert Smoothed(half(0.5), 0.1, n=2).bind(made).posterior_mean(z, T).shape == z.shape


def test_it_trains_the_demo_and_enters_the_referee(half, tmp_path):
    tiny = ["--trainer.accelerator", "cpu", "--trainer.devices", "1", "--trainer.enable_progress_bar", "false"]
    tiny += ["--trainer.max_steps", "2", "--data.batch_size", "16", "--trainer.val_check_interval", "2"]
    main(["fit", "-c", "demo", "--model.estimator", "own_half.Half", *tiny, "--data.val_images", "16"])
    assert list(tmp_path.rglob("last.ckpt"))
    rows = error_curve({"own": half(), "all": half(1.0)}, reference(), [T], num_z=8, repeats=4)
    error = {row["estimator"]: row["mu_mse"] for row in rows}
    assert error["all"] < 1e-10 < error["own"]


class Written(Estimator):
    """An estimator whose hook is a function (z, t, x_source, generator)."""

    def __init__(self, hook, **flags):
        self.hook = hook
        vars(self).update(flags)

    def _posterior_mean(self, *arguments):
        return self.hook(*arguments)


@pytest.mark.parametrize("B", [1, 5, 6])  # 6 is the width, where (B,) would broadcast.
def test_noise_levels_broadcast_over_their_items(B):
    made = reference()
    z, _ = latents(made, B)
    t = torch.linspace(1, 3, B)
    found = Written(lambda z, t, *_: z / (1 + t**2), deterministic=True).bind(made).posterior_mean(z, t)
    expected = torch.stack([z[row] / (1 + t[row] ** 2) for row in range(B)])
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


def test_a_source_that_is_not_announced_is_not_given():
    made = reference()
    (z, x), seen = latents(made), []
    hook = Written(lambda z, t, x_source, _: seen.append(x_source) or z).bind(made)
    for hook.uses_source in (False, True):
        hook.posterior_mean(z, T, x)
    assert seen[0] is None
    assert torch.equal(seen[1], x)


def test_draws_without_the_generator_repeat_with_it_and_differ_from_call_to_call():
    made = reference()
    z, _ = latents(made)
    own = Written(lambda z, *_: z + torch.randn_like(z)).bind(made)
    before = torch.get_rng_state()
    generator = seeded()
    first, second = own.posterior_mean(z, T, None, generator), own.posterior_mean(z, T, None, generator)
    assert torch.equal(torch.get_rng_state(), before)
    again = seeded()
    assert torch.equal(own.posterior_mean(z, T, None, again), first)
    assert torch.equal(own.posterior_mean(z, T, None, again), second)
    assert not torch.equal(first, second)


def test_randomness_of_what_calls_itself_deterministic_is_refused():
    own = Written(lambda z, *_: z + torch.randn_like(z), deterministic=True)
    with pytest.raises(
        InputError, match=r"estimators\.own: Written says that it is deterministic, but two calls differ"
    ):
        error_curve({"own": own}, reference(), [T], num_z=4, repeats=2)


def test_options_that_stick_are_told(half, recwarn, tmp_path):
    (tmp_path / "own_count.py").write_text(
        OWN.replace("Half", "Count")
        .replace("share: float = 0.5", "n: int = 30")
        .replace("self.share = share", "self.share = 1 / n")
    )
    main(["plan", "-c", "demo", "--model.estimator", "own_count.Count"])
    told = [str(warning.message) for warning in recwarn if "takes over" in str(warning.message)]
    assert told == [
        "--model.estimator own_count.Count takes over n=64 of the config's KNN; for other values give "
        "--model.estimator.n …"
    ]
    recwarn.clear()
    main(["plan", "-c", "demo", "--model.estimator", "own_count.Count", "--model.estimator.n", "3"])
    assert not [warning for warning in recwarn if "takes over" in str(warning.message)]
