"""Every file in configs/estimators works without changes in the demo, in the runs of the tables and in flows."""

import pytest
import torch

from lit_knn.reference import ReferenceSet
from main import main, make_cli
from tests import ROOT
from tests.toys import pixels

FILES = sorted((ROOT / "configs" / "estimators").glob("*.yaml"))
# One step with a small network; nothing is measured or kept.
STEP = ["--trainer.max_steps", "1", "--trainer.limit_val_batches", "0", "--trainer.callbacks", "[]"]
STEP += ["--trainer.logger", "false", "--trainer.enable_checkpointing", "false", "--data.batch_size", "8"]
STEP += ["--trainer.enable_progress_bar", "false", "--trainer.enable_model_summary", "false"]
STEP += ["--model.net.channels", "8"]
WARPING = ("flow/digits", "table2/digits", "table2/edm_knn")
UNWARPED = ("patch_posterior", "pca_locality", "smoothed", "wiener")
EVERY = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)

pytestmark = pytest.mark.filterwarnings("ignore:.* the default ")


@pytest.fixture(autouse=True)
def _work_in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def of_warped(path, run):
    """Extra options for a run that warps images: these estimators refuse warped posteriors."""
    return ["--model.warped", "source"] if path.stem in UNWARPED and run in WARPING else []


# With these options `table1/digits` is the demo.
@pytest.mark.slow  # The tests of each module train with some of them, and the next test binds all.
@pytest.mark.parametrize("run", ["demo", "flow/digits", "table2/digits", "table2/digits_conditional"])
@EVERY
def test_it_trains_on_the_digits(path, run):
    config = str(ROOT / "configs" / f"{run}.yaml")
    main(["fit", "-c", config, "--model.estimator", str(path), *STEP, *of_warped(path, run)])


@pytest.fixture(scope="module")
def few_colour_images():
    return ReferenceSet(pixels(N=30, shape=(3, 16, 16)))


# Pairs of a run and an estimator differ only in how their options meet. One run meets every estimator, the others some:
# with and without options, with another estimator within, and one that refuses warped images.
FEW = ("one_sample", "knn", "switched", "smoothed")
assert set(FEW) <= {path.stem for path in FILES}
PAIRS = [
    pytest.param(path, run, marks=() if run == "table1/ict_knn" or path.stem in FEW else pytest.mark.slow)
    for run in ("table1/ict_knn", "table2/edm_knn", "flow/cifar10")
    for path in FILES
]


@pytest.mark.parametrize(("path", "run"), PAIRS, ids=lambda value: getattr(value, "stem", value))
def test_it_is_bound_in_the_runs_of_the_tables(path, run, few_colour_images):
    options = ["--model.estimator", str(path), "--model.net", str(ROOT / "configs" / "models" / "unet.yaml")]
    options += ["--model.net.channels", "8", "--trainer.accelerator", "cpu"]
    options += of_warped(path, run)
    model = make_cli(["-c", str(ROOT / "configs" / f"{run}.yaml"), *options], run=False).model
    estimator = model.estimator
    if estimator.needs_reference:
        estimator.bind(few_colour_images)
    x = few_colour_images.gather(torch.arange(4))
    z, t = x + 2 * torch.randn_like(x), torch.tensor([1e-4, 0.002, 2.0, 9999.0])
    mean = estimator.posterior_mean(z, t, x_source=x)
    assert mean.isfinite().all()
    assert mean.shape == x.shape
