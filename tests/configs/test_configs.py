"""Every config is parsed and made, has the numbers of its source, and a run at 64x64 trains from a folder of images."""

import inspect
import math
from pathlib import Path
from unittest.mock import patch

# The import keeps the functions of torch.nn.init, so it must come before `unfilled_weights` replaces some.
import diffusers.models.modeling_utils  # noqa: F401
import pytest
import pytorch_lightning as pl
import torch
import yaml
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.cli import LightningArgumentParser

from lit_knn import estimators
from lit_knn.commands.cli.make_cli import make_cli
from lit_knn.data import ReferenceDataModule
from lit_knn.estimators import Estimator
from lit_knn.modules import LitEstimator, LitICT
from lit_knn.modules.base import EstimatorTraining
from lit_knn.nets import UNet
from main import main
from tests.config_files import CONFIGS, RUNS, resolved
from tests.image_files import encoded, pixels, write_folder
from tests.networks import write_own, write_published

EVALUATED = sorted((CONFIGS / "evaluate").glob("f*d*.yaml"))
PART_TYPES = {"data": ReferenceDataModule, "models": torch.nn.Module, "estimators": Estimator}


def unfilled_weights():
    """Weights stay as the memory was, because 300 million random numbers take seconds."""
    fill = lambda tensor, *args, **kwargs: tensor  # noqa: E731
    names = ("kaiming_uniform_", "normal_", "uniform_", "xavier_uniform_")
    return patch.multiple(torch.nn.init, **dict.fromkeys(names, fill))


def parse(name, *args):
    with unfilled_weights():
        return make_cli(
            ["-c", str(CONFIGS / name), "--trainer.accelerator", "cpu", *args], run=False
        )


pytestmark = pytest.mark.usefixtures("own_folder")


@pytest.fixture
def trained_networks(own_folder):
    """The network files that the runs need, in the current folder."""
    write_own("runs/table2_digits/knn_0/checkpoints/last.ckpt", channels=32, augment_dim=9)
    write_own("runs/table1_digits/knn_0/checkpoints/last.ckpt", channels=32)
    write_published("data/edm-cifar10-32x32-uncond-vp.pkl")


@pytest.mark.usefixtures("trained_networks")
@pytest.mark.parametrize("path", RUNS, ids=lambda p: str(p.relative_to(CONFIGS)))
def test_every_run_config_makes_a_run_of_its_name(path):
    # Users download a published network themselves. The one of the test is small.
    options = {
        "table2/published": ("--model.estimator.path", "data/edm-cifar10-32x32-uncond-vp.pkl")
    }
    options |= {
        "distillation/cifar10": options["table2/published"],
        "ect/cifar10": ("--model.net", "null"),
    }
    options |= dict.fromkeys(
        ("table1/sct", "table1/sct_knn", "table1/sct_exact"), options["ect/cifar10"]
    )
    of_photos = "photos" in str(path.relative_to(CONFIGS))
    run = str(path.relative_to(CONFIGS).with_suffix(""))
    if of_photos:  # Their networks have the channels of the data.
        write_folder(Path("photos"), {f"{i}.png": encoded(pixels(10, 12)) for i in range(4)})
        options[run] = ("--data.path", "photos", "--data.batch_size", "4")
    cli = parse(path, *options.get(run, ()))
    if of_photos:
        assert cli.config.model.init_args.net.init_args.in_channels == 1
    assert isinstance(cli.model, EstimatorTraining | LitEstimator)
    assert isinstance(cli.datamodule, pl.LightningDataModule)
    assert path.read_text().startswith("#")
    assert "lit-knn " in path.read_text()
    name = resolved(path)["trainer"]["logger"]["init_args"]["name"]
    folder = path.parent.name if path.parent != CONFIGS else ""
    # The name is the folder's, with or without a part of the file's; figures of analytic models have the file's.
    assert name == path.stem or (
        folder and name.startswith(folder) and name[len(folder) + 1 :] in path.stem
    )


@pytest.mark.parametrize(
    "path",
    sorted(p for folder in PART_TYPES for p in (CONFIGS / folder).glob("*.yaml")),
    ids=lambda p: str(p.relative_to(CONFIGS)),
)
def test_every_part_config_spells_all_arguments(path):
    kind, parser, config = (
        PART_TYPES[path.parent.name],
        LightningArgumentParser(),
        yaml.safe_load(path.read_text()),
    )
    parser.add_subclass_arguments(kind, "part")
    parsed = parser.parse_args(["--part", str(path)])
    with unfilled_weights():
        part = parser.instantiate_classes(parsed).part
    assert isinstance(part, kind)
    assert path.read_text().startswith("#")
    if kind is Estimator:  # A new class_path keeps arguments that it shares with the old one.
        cls = getattr(estimators, config["class_path"].rsplit(".", 1)[1])
        assert set(config.get("init_args", {})) == set(inspect.signature(cls).parameters) - {
            "args",
            "kwargs",
        }
    # All but the seed, which the application sets from --seed_everything.
    if kind is ReferenceDataModule:
        assert "seed" not in config["init_args"]
        assert parsed.part.init_args.as_dict() == {"seed": 0, **config["init_args"]}


# Published numbers of parameters. Table 2's network has a layer of 9 x 128 for the augmentation labels. EDM's networks
# at 64x64 have 61.8 and 295.9 million, the latter with 768,000 weights for its 1000 classes.
@pytest.mark.parametrize(
    ("names", "parameters"),
    [
        (("table1/ict", "table1/ict_stf", "table1/ict_knn"), 56_395_523),
        (("table2/edm", "table2/edm_stf", "table2/edm_knn"), 55_732_739 + 9 * 128),
        (("celeba64/ict_knn",), 61_804_419),
        (("imagenet64/ict_knn",), 295_131_267),
    ],
)
def test_networks_have_the_published_number_of_parameters(names, parameters):
    for name in names:
        model = parse(f"{name}.yaml").model
        assert sum(p.numel() for p in model.parameters()) == parameters
        assert "table1" not in name or {
            m.dropout for m in model.modules() if hasattr(m, "dropout")
        } == {0.3}


# A run, another one, and the options in which alone they may differ, and do.
CLASSES = "class_conditional sampling_class num_classes k n name"
TRAINER = "accumulate_grad_batches val_check_interval callbacks"
RELATED = [
    ("table1/ict", "table1/ict_knn", "estimator solver"),
    ("table1/ict_stf", "table1/ict_knn", "estimator"),
    ("table1/sct", "table1/sct_knn", "estimator"),
    ("table1/sct", "table1/sct_exact", "estimator"),
    ("table2/edm", "table2/edm_knn", "estimator"),
    ("table2/edm_stf", "table2/edm_knn", "estimator"),
    ("demo", "table1/digits", "CheckpointByImages name"),
    ("table1/digits_conditional", "table1/digits", f"{CLASSES} CheckpointByImages"),
    ("table2/digits_conditional", "table2/digits", f"{CLASSES} augmentation augment_dim warped"),
    ("distillation/cifar10", "table1/ict_knn", "estimator name"),
    ("distillation/digits", "table1/digits", "estimator name"),
    ("figure4/cifar10", "table1/ict_knn", f"{TRAINER} name"),
    ("figure4/digits", "table1/digits", "val_check_interval CheckpointByImages SampleGrid name"),
    ("celeba64/ict_knn", "table1/ict_knn", f"data net include_source {TRAINER} precision name"),
    ("imagenet64/ict_knn", "celeba64/ict_knn", "path net sampling_sigmas name"),
    (
        "imagenet64/ict_knn_conditional",
        "imagenet64/ict_knn",
        f"{CLASSES} data include_source dropout",
    ),
    ("imagenet64/estimator_error", "celeba64/estimator_error", "path name"),
    (
        "figure2/digits",
        "figure2/cifar10",
        "data KNN STF num_images t_min t_max accelerator devices name",
    ),
    ("figure3/digits", "figure3/cifar10", "data estimators num_z repeats accelerator devices name"),
    ("figure3/beyond", "figure3/cifar10", "estimators num_z repeats name"),
    ("figure3/ablation_digits", "figure3/digits", "estimators num_z t_min name"),
    ("figure3/ablation_n", "figure3/ablation_k", "estimators name"),
    ("figure3/ablation_k_n64", "figure3/ablation_k", "estimators name"),
    (
        "analytic/hybrid_digits",
        "figure5/digits",
        "data estimators network t_switch num_samples held_out folder name",
    ),
    ("flow/digits", "table2/digits", "model SampleGrid name"),
    ("latents/imagenet256_dit", "latents/imagenet256_flow", "model"),
    ("photos/flow", "photos/edm", "model hflip num_steps name"),
    ("flow/photos_dit", "photos/flow", "net name"),
    ("photos/ict", "photos/edm", "model hflip num_steps name"),
    ("photos/meanflow", "photos/ict", "model name"),
    ("evaluate/fd_dinov2", "evaluate/fid", "extractor batch_size filename monitor"),
    ("evaluate/fd_pixels", "evaluate/fid", "extractor batch_size filename monitor num_samples"),
    ("evaluate/fd_efficientnet_lite0", "evaluate/fid", "extractor filename monitor num_samples"),
    ("data/cifar10_flipped", "data/cifar10", "hflip"),
    ("data/imagenet64", "data/celeba64", "path"),
    ("estimators/knn_with_source", "estimators/knn", "include_source"),
    ("models/ddpmpp64", "models/ddpmpp", "augment_dim dropout image_size multipliers"),
]


def options(value, place=()):
    """All options of a config by their places, a tuple of names; a callback's is that of its class."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        value = {callback["class_path"].rpartition(".")[2]: callback for callback in value}
    if not isinstance(value, dict):
        return {place: value}
    return {
        key: own
        for name, part in value.items()
        for key, own in options(part, (*place, name)).items()
    }


@pytest.mark.parametrize(("one", "other", "names"), RELATED)
def test_related_configs_differ_in_what_they_say_alone(one, other, names):
    ours, theirs = (options(resolved(CONFIGS / f"{name}.yaml")) for name in (one, other))
    differing = [
        key
        for key in ours.keys() | theirs.keys()
        if ours.get(key, "none") != theirs.get(key, "none")
    ]
    assert [key for key in differing if not {*key} & {*names.split()}] == []
    assert {*names.split()} <= {part for key in differing for part in key}


# Each row has a config, words of its header, and the option and value that they must agree with.
SAID = [
    ("evaluate/fid", "of 50,000 samples", "num_samples", 50_000),
    ("evaluate/memorisation", "of 1,000 samples", "num_samples", 1000),
    ("figure3/cifar10", "10,000 latents", "num_z", 10_000),
    ("figure3/cifar10", "100 estimates at each", "repeats", 100),
    ("figure3/cifar10", "at 24 levels", "noise_levels", 24),
    ("figure3/beyond", "256 latents", "num_z", 256),
    ("figure3/beyond", "10 estimates at each", "repeats", 10),
    ("celeba64/estimator_error", "each of 12 levels", "noise_levels", 12),
    ("celeba64/digits", "reads 5 of its 30 lists", "nprobe", 5),
    ("celeba64/digits", "reads 5 of its 30 lists", "factory", "IVF30,SQ8"),
    # four methods
    ("figure5/cifar10", "for each\n# of 32 points", "t_switch", [0.1, 0.2, 0.5, 1, 2, 5, 10, 20]),
    ("figure5/cifar10", "50,000 samples", "num_samples", 50_000),
    ("analytic/samples_digits", "above t = 0.6", "t", 0.6),
    ("flow/cifar10", "400,000 steps", "max_steps", 400_000),
    ("flow/cifar10", "clipped to norm 1", "gradient_clip_val", 1),
    ("flow/digits", "after 1,500\n# steps", "max_steps", 1500),
    ("ect/digits", "300 steps", "max_steps", 300),
    ("sct/digits", "600 steps", "max_steps", 600),
    ("ect/digits", "halves every 75 steps", "stage_steps", 75),
    ("table1/ict_knn", "every 2.5 million images", "every_n_images", 2_500_000),
    ("photos/edm", "Every 50 steps", "val_check_interval", 50),
    ("photos/edm", "of 128 samples", "num_samples", 128),
    ("photos/edm", "10 Heun steps", "sampling_steps", 10),
    ("flow/photos_dit", "2x2 pixels", "patch_size", 2),
    ("estimators/stable_velocity", "so the switch is\n# at t = 1", "t", 1),
    ("estimators/mixed", "near β = 0.94", "share", 0.94),
    ("estimators/stable_velocity", "n = 256 is the published capacity", "n", 256),
]


@pytest.mark.parametrize(("name", "words", "option", "value"), SAID)
def test_the_header_of_a_config_tells_its_options(name, words, option, value):
    path = CONFIGS / f"{name}.yaml"
    assert words in path.read_text()
    assert value in [own for place, own in options(resolved(path)).items() if place[-1] == option]


@pytest.mark.usefixtures("trained_networks")
def test_evaluations_have_numbers_and_networks_of_their_sources():
    defaults = {name: p.default for name, p in inspect.signature(LitICT).parameters.items()}
    expected = {"lr": 1e-4, "ema_decay": 0.99993, "total_steps": 400_000, "s0": 10, "s1": 1280}
    expected |= {
        "P_mean": -1.1,
        "P_std": 2.0,
        "sigma_data": 0.5,
        "sigma_min": 0.002,
        "sigma_max": 80.0,
        "rho": 7.0,
    }
    assert {name: defaults[name] for name in expected} == expected
    kinds = {
        type(callback).__name__: callback
        for callback in parse("figure5/cifar10.yaml").trainer.callbacks
    }
    swept = kinds["HybridSampling"].estimators
    # The baseline, which starts from noisy data, is in every sweep.
    found = {
        name: [type(e).__name__, *(getattr(e, c, None) for c in "kn")] for name, e in swept.items()
    }
    assert found == {
        "KNN": ["KNN", 2048, 256],
        "STF": ["STF", None, 256],
        "Exact": ["Exact", None, None],
    }
    # A curve has the options that its name says.
    for path in (CONFIGS / "figure3").glob("ablation_*.yaml"):
        curves = resolved(path)["trainer"]["callbacks"][0]["init_args"]["estimators"]
        for name, own in curves.items():
            assert {word for word in name.split() if "=" in word} <= {
                f"{o}={v}" for o, v in own["init_args"].items()
            }
        if "_k" in path.stem:  # The ablation over k has one n.
            assert {own["init_args"]["n"] for own in curves.values()} == {
                64 if path.stem.endswith("n64") else 256
            }
    # The networks of figures are those of the run that trains them.
    trained = parse("table2/digits.yaml").model.denoiser.model.state_dict()
    figure5 = resolved(CONFIGS / "figure5" / "digits.yaml")["trainer"]["callbacks"][0]["init_args"]
    part = resolved(CONFIGS / "models" / "unet_digits.yaml")
    for given in (figure5["network"]["init_args"]["net"], part):
        shapes = {
            name: value.shape for name, value in UNet(**given["init_args"]).state_dict().items()
        }
        assert shapes == {name: value.shape for name, value in trained.items()}


# Published settings, by the option or by the end of its place in the config.
SETTINGS = {
    # run_ecm_1hour.sh of github.com/locuslab/ect, and the defaults of its ct_train.py and loss.py.
    "ect/cifar10": {
        "q": 256,
        "k": 8,
        "b": 1,
        "stages": 1,
        "P_mean": -1.1,
        "P_std": 2,
        "sampling_sigmas": [80, 0.821],
    }
    | {"lr": 1e-4, "ema_decay": 0.9993, "batch_size": 128, "dropout": 0.2}
    # EDM's network, without the layer for augmentation labels.
    | {
        "net.class_path": "lit_knn.nets.DDPMpp",
        "channels": 128,
        "multipliers": [2, 2, 2],
        "blocks": 4,
    }
    | {"attention_at": [16], "augment_dim": 0},
    # cifar10_v1.sh of github.com/Gsunshine/py-meanflow: 200 epochs of warm-up with 50 steps of 1,024 images each. Of
    # its decays of a step, 0.99995 is that of the demo.
    "meanflow/cifar10": {
        "max_steps": 800_000,
        "lr": 6e-4,
        "lr_ramp_up_images": 10_240_000,
        "dropout": 0.2,
    }
    | {"batch_size": 64, "accumulate_grad_batches": 16, "ema_half_life_images": 14_200_000}
    | {"model.init_args.times.init_args.mean": -0.6, "lower_times.init_args.mean": -4}
    | {"model.init_args.times.init_args.std": 1.6, "lower_times.init_args.std": 1.6}
    | {"different": 0.75, "power": 0.75},
    # train.py of github.com/willisma/SiT: AdamW without decay is Adam, and the average's decay is 0.9999.
    "latents/imagenet256_flow": {
        "lr": 1e-4,
        "lr_ramp_up_images": 0,
        "ema_half_life_images": round(-256 * math.log(2) / math.log(0.9999)),
        "label_dropout": 0.1,
        "batch_size": 32,
        "accumulate_grad_batches": 8,
        "hflip": True,
    },
    "table2/published": {"sampling_steps": 18, "sigma_min": 0.002, "sigma_max": 80, "rho": 7}
    | {"Fidelity.init_args.num_samples": 50_000},
    # Yoon et al. 2023: a copy is nearer to one image than a third of its distance to the next.
    "evaluate/memorisation": {"threshold": 1 / 3},
    "analytic/samples_digits": {"threshold": 1 / 3},
    "figure5/cifar10": {"threshold": 1 / 3, "num_steps": 18},
    # The least error of a gradient: the abstract of arXiv 2605.09235v2. At β = 1 the tangent is the marginal velocity.
    "estimators/mixed": {"share": 0.94, "first.class_path": "lit_knn.estimators.OneSample"}
    | {"second.class_path": "lit_knn.estimators.Exact"},
    "celeba64/estimator_error": {"one sample.init_args.n": 1},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_runs_have_the_settings_of_their_sources(name):
    found = {
        f".{'.'.join(place)}": own
        for place, own in options(resolved(CONFIGS / f"{name}.yaml")).items()
    }
    for option, value in SETTINGS[name].items():
        assert [own for place, own in found.items() if place.endswith(f".{option}")] == [value], (
            option
        )


@pytest.mark.parametrize("path", EVALUATED, ids=lambda p: p.stem)
def test_evaluations_are_added_to_the_callbacks_of_any_run(path):
    more = ["--trainer.callbacks.num_samples", "99", "--trainer.callbacks.extra_metrics", "[kid]"]
    cli = parse("table1/ict_knn.yaml", "-c", str(path), *more)
    kinds = {type(callback).__name__: callback for callback in cli.trainer.callbacks}
    assert {"SampleWriter", "CheckpointByImages", "Fidelity"} <= set(kinds)
    fidelity, best = (
        kinds["Fidelity"],
        next(c for c in cli.trainer.callbacks if type(c) is ModelCheckpoint),
    )
    assert (fidelity.num_samples, fidelity.measure.extra_metrics) == (99, ("kid",))
    assert fidelity.measure.extractor.metric == path.stem
    assert (best.monitor, best.mode) == (path.stem, "min")
    assert f"configs/evaluate/{path.name}" in path.read_text()


# Section "Score Estimation on Additional Datasets".
@pytest.mark.parametrize(
    ("name", "factory", "nprobe"),
    [("celeba64", "IVF1788,SQ8", 25), ("imagenet64", "IVF4527,SQ8", 100)],
)
def test_64x64_runs_tell_the_index_of_the_paper(name, factory, nprobe):
    # The options for the paper's index stand in the header of the data's file.
    header = (
        (CONFIGS / "data" / f"{name}.yaml")
        .read_text()
        .partition("class_path")[0]
        .replace("\\\n#", "")
    )
    (options,) = [
        line.strip("# ").split()
        for line in header.splitlines()
        if "--data.index FaissIndex" in line
    ]
    data = parse(f"{name}/ict_knn.yaml", "--data.path", "my.npy", *options).datamodule
    assert (data.path, data.index.factory, data.index.nprobe) == ("my.npy", factory, nprobe)
    assert (data.index.lossless, data.index.shared) == (True, True)


@pytest.mark.filterwarnings("ignore:120 images are few")
def test_a_64x64_run_trains_from_a_folder_of_images():
    write_folder(Path("source"), {f"{i:03d}.png": encoded(pixels(72, 96, 3)) for i in range(120)})
    main(["prepare", "source", "data/celeba64.npy", "--size", "64", "--center-crop"])
    # 44 lists: c = 4·sqrt(N) and at least c/50 are searched, as in the paper for 202,599 and 1,281,167.
    index = {"factory": "IVF44,SQ8", "nprobe": 1, "lossless": True, "cache_dir": "runs/index_cache"}
    # The runs' pictures need 64 samples each, and these would take longer than all steps. Without instructions for
    # bfloat16, a convolution would take 60 times as long.
    trainer = {
        "callbacks": [],
        "enable_progress_bar": False,
        "accelerator": "cpu",
        "precision": "32-true",
    }
    trainer |= {"accumulate_grad_batches": 1, "limit_train_batches": 3, "val_check_interval": 3}
    data = {
        "batch_size": 4,
        "val_images": 4,
        "index": {"class_path": "lit_knn.index.FaissIndex", "init_args": index},
    }
    config = {"trainer": {**trainer, "enable_model_summary": False}, "data": {"init_args": data}}
    Path("small.yaml").write_text(yaml.safe_dump(config))
    args = [
        "fit",
        "-c",
        str(CONFIGS / "celeba64" / "ict_knn.yaml"),
        "-c",
        "small.yaml",
        "--model.net.channels",
        "16",
    ]
    args += [
        "--model.net.blocks",
        "1",
        "--model.net.multipliers",
        "[1, 1, 1, 1]",
        "--model.estimator.k",
        "32",
    ]
    main([*args, "--model.estimator.n", "8", "--trainer.max_steps", "3"])
    assert list(Path("runs/index_cache").glob("*.index"))
    checkpoint = torch.load("runs/celeba64/knn_0/checkpoints/last.ckpt", weights_only=False)
    assert (checkpoint["images_seen"], checkpoint["image_shape"]) == (3 * 4, (3, 64, 64))
