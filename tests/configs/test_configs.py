from unittest.mock import patch

import pytest
import pytorch_lightning as pl
import torch
import yaml
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.cli import LightningArgumentParser

from lit_knn.estimators import KNN, STF, Estimator, Exact, OneSample
from lit_knn.modules import LitEstimator, LitICT
from lit_knn.modules.base import EstimatorTraining
from lit_knn.nets import ConvResNet, ConvUNet, DDPMpp, UNet
from lit_knn.sampling.solvers import euler_step, heun_step
from main import main, make_cli
from tests import ROOT
from tests.config_files import PARTS, resolved
from tests.networks import write_own, write_published, write_start

CONFIGS = ROOT / "configs"
RUNS = sorted(p for p in CONFIGS.rglob("*.yaml") if p.parent.name not in PARTS)
PART_TYPES = {"data": pl.LightningDataModule, "models": torch.nn.Module, "estimators": Estimator}


def parse(*args):
    """Parse and instantiate; weights stay as the memory was, because 300 million random numbers take seconds."""
    with unfilled_weights():
        return make_cli(args, run=False)


def unfilled_weights():
    fill = lambda tensor, *args, **kwargs: tensor  # noqa: E731
    names = ("kaiming_uniform_", "normal_", "uniform_", "xavier_uniform_")
    return patch.multiple(torch.nn.init, **dict.fromkeys(names, fill))


@pytest.fixture
def trained_networks(tmp_path, monkeypatch):
    """A folder with the network files that the runs need."""
    monkeypatch.chdir(tmp_path)
    write_own("runs/table2_digits/knn_0/checkpoints/last.ckpt", channels=32, augment_dim=9)
    write_start("runs/conv_resnet_digits/exact_0/checkpoints/last.ckpt", ConvResNet(1, channels=48))
    write_start("runs/conv_unet_digits/exact_0/checkpoints/last.ckpt", ConvUNet(1, multipliers=(1, 2)))
    write_published("data/edm-cifar10-32x32-uncond-vp.pkl")


@pytest.mark.usefixtures("trained_networks")
@pytest.mark.parametrize("path", RUNS, ids=lambda p: str(p.relative_to(CONFIGS)))
def test_every_run_is_parsed_and_instantiated(path, tmp_path):
    # Users download a published network themselves. The one of the test is small.
    options = {"table2/published": ("--model.estimator.path", "data/edm-cifar10-32x32-uncond-vp.pkl")}
    options |= {"ect/cifar10": ("--model.net", "null")}
    own = options.get(str(path.relative_to(CONFIGS).with_suffix("")), ())
    cli = parse("-c", str(path), "--trainer.accelerator", "cpu", "--trainer.default_root_dir", str(tmp_path), *own)
    assert isinstance(cli.model, EstimatorTraining | LitEstimator)
    assert isinstance(cli.datamodule, pl.LightningDataModule)
    assert path.read_text().startswith("#")
    assert "lit-knn " in path.read_text()


@pytest.mark.parametrize(
    "path",
    sorted(p for folder in PART_TYPES for p in (CONFIGS / folder).glob("*.yaml")),
    ids=lambda p: str(p.relative_to(CONFIGS)),
)
def test_every_part_is_parsed_and_instantiated(path):
    parser = LightningArgumentParser()
    parser.add_subclass_arguments(PART_TYPES[path.parent.name], "part")
    with unfilled_weights():
        part = parser.instantiate_classes(parser.parse_args(["--part", str(path)])).part
    assert isinstance(part, PART_TYPES[path.parent.name])
    assert path.read_text().startswith("#")


@pytest.mark.parametrize("path", sorted((CONFIGS / "estimators").glob("*.yaml")), ids=lambda p: p.stem)
def test_estimator_parts_spell_every_argument(path):
    # A new class_path keeps arguments that it shares with the old one, so each file must set all of them.
    import inspect

    import lit_knn.estimators as estimators

    config = yaml.safe_load(path.read_text())
    cls = getattr(estimators, config["class_path"].rsplit(".", 1)[1])
    expected = set(inspect.signature(cls).parameters) - {"args", "kwargs"}
    assert set(config.get("init_args", {})) == expected


# Table "Hyperparameter choices for CIFAR-10 consistency model training" (tab:hyperparams).
@pytest.mark.parametrize(
    ("name", "estimator", "solver"),
    [("ict", OneSample, euler_step), ("ict_knn", KNN, heun_step), ("ict_stf", STF, heun_step)],
)
def test_table1_runs_have_the_hyperparameters_of_the_paper(name, estimator, solver):
    cli = parse("-c", str(CONFIGS / "table1" / f"{name}.yaml"), "--trainer.accelerator", "cpu")
    h = cli.model.hparams
    assert cli.trainer.max_steps == h.total_steps == 400_000
    assert cli.datamodule.batch_size * cli.trainer.accumulate_grad_batches == 1024
    assert (h.lr, h.ema_decay) == (1e-4, 0.99993)
    assert (h.s0, h.s1, h.P_mean, h.P_std) == (10, 1280, -1.1, 2.0)
    # The network is NCSN++ with the paper's dropout.
    assert sum(p.numel() for p in cli.model.parameters()) == 56_395_523
    assert {m.dropout for m in cli.model.modules() if hasattr(m, "dropout")} == {0.3}
    assert cli.model.solver is solver
    assert type(cli.model.estimator) is estimator
    assert getattr(cli.model.estimator, "n", 1) == (1 if estimator is OneSample else 256)
    assert getattr(cli.model.estimator, "k", None) == (2048 if estimator is KNN else None)
    by_images = next(c for c in cli.trainer.callbacks if type(c).__name__ == "CheckpointByImages")
    assert by_images.every_n_images == 2_500_000


def test_defaults_of_the_module_are_those_of_the_paper():
    import inspect

    defaults = {name: p.default for name, p in inspect.signature(LitICT).parameters.items()}
    expected = {"lr": 1e-4, "ema_decay": 0.99993, "total_steps": 400_000, "s0": 10, "s1": 1280}
    expected |= {"P_mean": -1.1, "P_std": 2.0, "sigma_data": 0.5, "sigma_min": 0.002, "sigma_max": 80.0, "rho": 7.0}
    assert {name: defaults[name] for name in expected} == expected


# EDM's own training of CIFAR-10; Table 2 (tab:diffusion_results) repeats it with three targets.
@pytest.mark.parametrize(("name", "estimator"), [("edm", OneSample), ("edm_stf", STF), ("edm_knn", KNN)])
def test_table2_runs_have_the_hyperparameters_of_edm(name, estimator):
    cli = parse("-c", str(CONFIGS / "table2" / f"{name}.yaml"), "--trainer.accelerator", "cpu")
    h = cli.model.hparams
    assert (h.lr, h.lr_ramp_up_images, h.ema_half_life_images) == (1e-3, 10_000_000, 500_000)
    assert (h.P_mean, h.P_std, h.sigma_data, h.sampling_steps) == (-1.2, 1.2, 0.5, 18)
    images_per_step = cli.datamodule.batch_size * cli.trainer.accumulate_grad_batches
    assert images_per_step == 512
    assert cli.trainer.max_steps * images_per_step == 200_000_000
    assert cli.trainer.val_check_interval == 5_000 * cli.trainer.accumulate_grad_batches  # The file says 5,000 steps.
    assert cli.model.augmentation.p == 0.12
    # The network has 55,732,739 parameters, and a layer of 9 x 128 for the augmentation labels.
    assert sum(p.numel() for p in cli.model.parameters()) == 55_732_739 + 9 * 128
    assert type(cli.model.estimator) is estimator


@pytest.mark.usefixtures("trained_networks")
def test_figure5_has_the_estimators_and_the_number_of_samples_of_the_paper():
    cli = parse("-c", str(CONFIGS / "figure5" / "cifar10.yaml"), "--trainer.accelerator", "cpu")
    (sweep,) = (c for c in cli.trainer.callbacks if type(c).__name__ == "HybridSampling")
    # The baseline, which starts from noisy data, is in every sweep.
    assert {name: type(e) for name, e in sweep.estimators.items()} == {"KNN": KNN, "STF": STF, "Exact": Exact}
    assert (sweep.estimators["KNN"].k, sweep.estimators["KNN"].n, sweep.estimators["STF"].n) == (2048, 256, 256)
    assert (sweep.num_samples, sweep.num_steps) == (50_000, 18)


def test_measuring_configs_have_the_numbers_of_their_sources():
    evaluation = yaml.safe_load((CONFIGS / "evaluate" / "memorisation.yaml").read_text())
    # Yoon et al. 2023: a copy is nearer to one image than a third of its distance to the next.
    assert evaluation["trainer"]["callbacks+"][0]["init_args"]["threshold"] == pytest.approx(1 / 3)
    for name in ("celeba64", "imagenet64"):
        config = yaml.safe_load((CONFIGS / name / "estimator_error.yaml").read_text())
        (callback,) = config["trainer"]["callbacks"]
        assert callback["init_args"]["estimators"]["one sample"]["init_args"] == {"n": 1}


def test_a_run_without_its_network_file_names_it_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["validate", "-c", str(CONFIGS / "figure5" / "cifar10.yaml")])
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert "path=data/edm-cifar10-32x32-uncond-vp.pkl: no such file" in line


@pytest.mark.parametrize("path", sorted((CONFIGS / "evaluate").glob("f*d*.yaml")), ids=lambda p: p.stem)
def test_evaluations_are_added_to_the_callbacks_of_any_run(path):
    run = ("-c", str(CONFIGS / "table1" / "ict_knn.yaml"), "-c", str(path), "--trainer.accelerator", "cpu")
    text = path.read_text()
    cli = parse(*run, "--trainer.callbacks.num_samples", "99", "--trainer.callbacks.extra_metrics", "[kid]")
    kinds = [type(callback).__name__ for callback in cli.trainer.callbacks]
    assert {"SampleWriter", "CheckpointByImages", "Fidelity"} <= set(kinds)
    fidelity = next(c for c in cli.trainer.callbacks if type(c).__name__ == "Fidelity")
    assert fidelity.num_samples == 99
    assert fidelity.measure.extra_metrics == ("kid",)
    assert fidelity.measure.extractor.metric == path.stem
    (best,) = [c for c in cli.trainer.callbacks if type(c) is ModelCheckpoint]
    assert (best.monitor, best.mode) == (path.stem, "min")
    assert text.startswith("#")
    assert f"configs/evaluate/{path.name}" in text


# Section "Score Estimation on Additional Datasets".
# EDM's networks have 61.8 and 295.9 million parameters; the latter has 768,000 weights for its 1000 classes.
@pytest.mark.parametrize(
    ("name", "factory", "nprobe", "parameters"),
    [("celeba64", "IVF1788,SQ8", 25, 61_804_419), ("imagenet64", "IVF4527,SQ8", 100, 295_131_267)],
)
def test_64x64_runs_tell_the_index_of_the_paper_and_have_networks_of_edm(name, factory, nprobe, parameters):
    # The options for the paper's index stand in the header of the data's file.
    header = (CONFIGS / "data" / f"{name}.yaml").read_text().partition("class_path")[0].replace("\\\n#", "")
    (options,) = [line.strip("# ").split() for line in header.splitlines() if "--data.index FaissIndex" in line]
    run = ("-c", str(CONFIGS / name / "ict_knn.yaml"), "--trainer.accelerator", "cpu", "--data.path", "my.npy")
    index = parse(*run, *options).datamodule.index
    assert (index.factory, index.nprobe, index.lossless, index.shared) == (factory, nprobe, True, True)
    cli = parse(*run)
    assert (cli.model.estimator.k, cli.model.estimator.n) == (2048, 256)
    assert cli.datamodule.batch_size * cli.trainer.accumulate_grad_batches == 1024
    assert cli.datamodule.path == "my.npy"
    assert sum(p.numel() for p in cli.model.parameters()) == parameters


def test_the_networks_of_figures_are_those_of_the_run_that_trains_them():
    trained = parse("-c", str(CONFIGS / "table2" / "digits.yaml")).model.denoiser.model.state_dict()
    figure5 = yaml.safe_load((CONFIGS / "figure5" / "digits.yaml").read_text())
    options = figure5["trainer"]["callbacks"][0]["init_args"]["network"]["init_args"]["net"]["init_args"]
    part = yaml.safe_load((CONFIGS / "models" / "unet_digits.yaml").read_text())["init_args"]
    shapes = {name: value.shape for name, value in trained.items()}
    for given in (options, part):
        assert {name: value.shape for name, value in UNet(**given).state_dict().items()} == shapes


def test_the_hour_of_ect_has_the_settings_of_its_script():
    # run_ecm_1hour.sh of github.com/locuslab/ect, and the defaults of its ct_train.py and loss.py.
    run = yaml.safe_load((CONFIGS / "ect" / "cifar10.yaml").read_text())
    h = run["model"]["init_args"]
    assert (h["q"], h["k"], h["b"], h["stages"]) == (256, 8, 1, 1)
    assert (h["lr"], h["ema_decay"], h["P_mean"], h["P_std"], h["sampling_sigmas"]) == (
        1e-4,
        0.9993,
        -1.1,
        2,
        [80, 0.821],
    )
    assert (h["net"]["init_args"]["dropout"], run["data"]["init_args"]["batch_size"]) == (0.2, 128)
    # EDM's pickle has this network, with a layer of 9 x 128 for augmentation labels, which tuning leaves out.
    with torch.device("meta"):
        net = DDPMpp(**h["net"]["init_args"])
    assert sum(p.numel() for p in net.parameters()) == 55_732_739


@pytest.mark.parametrize("path", RUNS, ids=lambda p: str(p.relative_to(CONFIGS)))
def test_a_run_is_stored_under_the_name_of_its_config(path):
    name = resolved(path)["trainer"]["logger"]["init_args"]["name"]
    folder = path.parent.name if path.parent != CONFIGS else ""
    # The name is the folder's, with or without that of the file or its end; figures of analytic models have the file's.
    assert name == path.stem or (folder and name.startswith(folder) and path.stem.endswith(name[len(folder) + 1 :]))
