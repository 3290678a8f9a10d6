"""What a training module refuses when it is made, when it gets its data, and when it gets a checkpoint."""

import math

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import (
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    StochasticWeightAveraging,
    WeightAveraging,
)
from pytorch_lightning.tuner import Tuner
from torch import nn

from lit_knn.callbacks import PowerAverages, SampleGrid
from lit_knn.common.errors import InputError
from lit_knn.data import Digits
from lit_knn.estimators import KNN, MonteCarlo, Network, OneSample
from lit_knn.modules import (
    LitECT,
    LitEDM,
    LitFlow,
    LitICT,
    LitMeanFlow,
    LitScoreDifference,
    LitSCT,
)
from lit_knn.modules.augmentation import GeometricAugmentation
from lit_knn.modules.time_distributions import LogitNormalTimes
from lit_knn.nets import ADM, UNet
from lit_knn.nets.precond import EDMPrecond
from tests.networks import write_own, write_published, write_start
from tests.short_training import TRAINER, train
from tests.trained_runs import last
from tests.watched import Labelled, WatchedNet


def unet(**options):
    return UNet(1, **{"channels": 8, "multipliers": (1, 2), "blocks": 1} | options)


# A net that draws the labels it drops anew in each evaluation.
DROPPING = {
    "net": ADM(8, 1, 32, (1,), 1, head_width=32, num_classes=3, label_dropout=0.1, augment_dim=8)
}
DROPPING |= {"class_conditional": True, "guidance": 0.2}
WARPING = {
    "net": unet(augment_dim=17),
    "tangent": MonteCarlo(4),
    "augmentation": GeometricAugmentation(),
}
CASES = [
    (LitEDM, {"estimator": KNN}, r"the class KNN is no estimator: give an object, KNN\(\.\.\.\)"),
    (LitICT, {"estimator": "KNN"}, "'KNN' is no estimator"),
    (LitScoreDifference, {"estimator": KNN}, "the class KNN is no estimator"),
    (LitMeanFlow, {"net": UNet}, "the class UNet is no network: give an object"),
    (LitICT, {"net": None}, "None is no network"),
    (LitICT, {"lr": math.inf}, "lr must be finite and above 0, got inf"),
    (LitICT, {"s0": 0}, "s0"),
    (LitICT, {"total_steps": 0}, "total_steps must be at least 1, got 0"),
    (LitICT, {"rho": -7.0}, "rho must be finite and above 0, got -7.0"),
    (LitICT, {"rho": math.inf}, "rho must be finite and above 0, got inf"),
    (LitICT, {"sigma_min": 100.0}, "sigma_min"),
    (LitICT, {"predict_steps": 3}, "predict_steps=3 must be between 1 and"),
    (
        LitICT,
        {"net": unet(augment_dim=9)},
        "the net has augment_dim=9, but there is no augmentation",
    ),
    (LitICT, {"huber_c": 0.0}, "PseudoHuber: c must be finite and above 0, got 0.0"),
    (LitICT, {"sampling_sigmas": (80.0, 0.002)}, "sampling_sigmas"),
    (
        LitICT,
        {"sigma_max": 20.0},
        "sampling_sigmas begin at 80.0, but no level above sigma_max=20.0 is trained",
    ),
    (LitEDM, {"lr_ramp_up_images": -1}, "lr_ramp_up_images must be at least 0, got -1"),
    (
        LitEDM,
        {"net": unet(augment_dim=9)},
        "augmentation=null gives 0 labels, but the net has augment_dim=9",
    ),
    (LitEDM, {"class_conditional": True}, "class_conditional=True, but the net has num_classes=0"),
    (LitEDM, {"sampling_class": "a"}, "sampling_class='a', but .* num_classes=0"),
    (LitFlow, {"warped": "no"}, "warped='no' must be posterior or source"),
    (LitMeanFlow, {}, "the second time 8, but the net has augment_dim=0"),
    (LitMeanFlow, {"net": unet(augment_dim=8), "power": -1}, "power must be at least 0"),
    (LitMeanFlow, {"net": unet(augment_dim=8), "different": 1.5}, "different must be from 0 to 1"),
    (LitMeanFlow, {"net": unet(augment_dim=8), "kappa": 1}, "kappa must be at least 0 and below 1"),
    (
        LitMeanFlow,
        {"net": unet(augment_dim=8), "sampling_steps": 0},
        "sampling_steps must be at least 1",
    ),
    (LogitNormalTimes, {"std": 0.0}, "std must be above 0, got 0.0"),
    (LogitNormalTimes, {"mean": math.inf}, "mean must be finite, got inf"),
    (
        LogitNormalTimes,
        {"mean": -1e3},
        "there is no probability between low=0.0001 and high=0.9999",
    ),
    (LitMeanFlow, WARPING, "tangent cannot estimate the posterior of warped images"),
    (
        LitMeanFlow,
        DROPPING | {"kappa": 0.9},
        "guidance=2.0 needs a network that was trained without classes",
    ),
    (
        LitMeanFlow,
        DROPPING | {"label_dropout": 0.1},
        "label_dropout=0.1, but the net drops labels, too",
    ),
    (LitSCT, {"tangent_floor": -0.1}, "tangent_floor must be at least 0 and finite, got -0.1"),
    (LitSCT, {"tangent_warmup_steps": -1}, "tangent_warmup_steps must be at least 0, got -1"),
    (LitSCT, {"sigma_max": 40.0}, "begin at 80.0, but no level above sigma_max=40.0 is trained"),
    (LitSCT, {"P_mean": 300.0}, "leave no probability between 0.002 and 80.0"),
    (LitSCT, {"net": None}, "net=null needs start, the file of a trained network"),
    (LitSCT, {"net": unet(augment_dim=8)}, "augment_dim=8, but there is no augmentation"),
    (LitECT, {"q": 1.0}, "q must be above 1 and finite, because the gap shrinks"),
    (LitECT, {"k": -1.0}, "k must be at least 0 and finite, got -1"),
    (LitECT, {"stage_steps": -5}, "stage_steps must be at least 1, got -5"),
    (LitECT, {"stages": 24}, "q=2.0 and stages=24 leave r within float32's rounding of t"),
    (
        LitECT,
        {"k": 1e300},
        "k=1e[+]300, .* leave r = 0 at all t up to 80 in the last stage, so r never approaches t",
    ),
    (LitECT, {"sigma_data": 0.3}, r"start=.*own\.ckpt was trained with sigma_data=0.5, not 0.3"),
    (
        LitECT,
        {"net": unet(augment_dim=9)},
        "the net has augment_dim=9, but there is no augmentation",
    ),
    (
        LitECT,
        {"net": unet(channels=16)},
        r"start=.*own\.ckpt: the weights do not fit the architecture",
    ),
    (LitECT, {"start": None, "net": None}, "start=null needs net"),
    (LitECT, {"start": "none.pkl"}, r"start=none\.pkl: no such file"),
    (PowerAverages, {"lengths": [0.5]}, "a relative length must be above 0"),
    (
        PowerAverages,
        {"lengths": [0.1, 0.1]},
        "relative lengths must be different numbers, at least one",
    ),
    (PowerAverages, {"every_n_images": 0}, "every_n_images must be at least 1, got 0"),
    (PowerAverages, {"dtype": "int8"}, "dtype=int8 is not one of float32, float16, bfloat16"),
]


@pytest.mark.parametrize(
    ("kind", "options", "message"), CASES, ids=lambda value: getattr(value, "__name__", None)
)
def test_an_option_out_of_range_is_named(kind, options, message, tmp_path):
    trains = issubclass(kind, pl.LightningModule)
    given = {"net": unet(), "estimator": OneSample()} if trains else {}
    given |= {"start": write_own(tmp_path / "own.ckpt")} if kind is LitECT else {}
    with pytest.raises(InputError, match=f"^{kind.__name__}: .*{message}") as caught:
        kind(**given | options)
    assert "\n" not in str(caught.value)


def test_start_from_other_architecture_or_batch_metric_refused(trained_run, tmp_path):
    published = write_published(tmp_path / "published.pkl")
    foreign = write_start(tmp_path / "foreign.ckpt", WatchedNet())
    for start, net, message in [
        (
            last(trained_run("ict")[0]),
            unet(),
            r"last\.ckpt: a consistency model cannot be tuned here",
        ),
        (foreign, None, r"foreign\.ckpt: the file does not tell the architecture .*: give net"),
        (published, unet(), r"published\.pkl: the weights do not fit the architecture"),
    ]:
        with pytest.raises(InputError, match=f"^LitECT: start=.*{message}") as caught:
            LitECT(OneSample(), start, net)
        assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match="in_channels=3, but the images have the shape"):
        train(LitECT(OneSample(), published), Digits(batch_size=64), 1)
    with pytest.raises(InputError, match="metric must return the distance of each item"):
        train(
            LitECT(OneSample(), write_own(tmp_path / "own.ckpt"), metric=nn.functional.mse_loss),
            Digits(),
            1,
        )


NAMED = {"class_names": ["cat", "house", "tower"]}


@pytest.mark.parametrize(
    ("num_classes", "options", "data", "words"),
    [
        (
            3,
            {"class_conditional": False},
            {},
            "LitEDM: class_conditional=False, but the net has num_classes=3",
        ),
        (3, {"sampling_class": 3}, {}, "LitEDM: sampling_class=3, but the net has num_classes=3"),
        (3, {"sampling_class": -1}, {}, "LitEDM: sampling_class=-1, but the net has num_classes=3"),
        (
            3,
            {"sampling_class": "zebra"},
            NAMED,
            "='zebra' is no class; the classes are cat, house, tower",
        ),
        (
            3,
            {},
            {"class_names": ["cat", "cat", "tower"]},
            "LitEDM: class_names must be 3 different names",
        ),
        (
            3,
            {},
            {"in_reference": False},
            "LitEDM: class_conditional=True, but the data has no labels",
        ),
        (
            3,
            {},
            {"lowest": 1},
            "LitEDM: the labels of the data are 1 to 3, but .* no image has the label 0",
        ),
        # Of ten classes, samples of seven would be of classes that do not exist.
        (10, {}, {}, "LitEDM: the labels of the data are 0 to 2, but .* num_classes=10: give it 3"),
        (
            3,
            {},
            {"in_batches": False},
            "LitEDM: class_conditional=True, but the batches have no labels",
        ),
        (3, {"estimator": KNN(k=40, n=4)}, {}, r"^class 0: KNN: k=40 is more than the \d+ images"),
    ],
)
def test_classes_that_do_not_fit_are_refused(num_classes, options, data, words):
    options = {"estimator": OneSample(), "class_conditional": True} | options
    with pytest.raises(InputError, match=words):
        train(LitEDM(WatchedNet(num_classes=num_classes), **options), Labelled(**data), 1)


def test_a_checkpoint_of_another_sigma_data_or_net_is_refused():
    saved = {
        "state_dict": LitEDM(unet(), OneSample()).state_dict(),
        "hyper_parameters": {"sigma_data": 0.5},
    }
    LitEDM(unet(), OneSample()).check_checkpoint(saved)
    with pytest.raises(
        InputError, match=r"preconditioning: sigma_data is 0.5 in the checkpoint, 0.4 in LitEDM"
    ):
        LitEDM(unet(), OneSample(), sigma_data=0.4).check_checkpoint(saved)
    consistency = LitICT(unet(), OneSample(), sigma_min=0.01)
    of_ict = {
        "state_dict": consistency.state_dict(),
        "hyper_parameters": {"sigma_data": 0.5, "sigma_min": 0.002},
    }
    with pytest.raises(InputError, match=r"sigma_min is 0.002 in the checkpoint, 0.01 in LitICT"):
        consistency.check_checkpoint(of_ict)
    saved["generative_model"] = {"kind": "flow"}
    with pytest.raises(
        InputError, match=r"another architecture: .*; the checkpoint is of a flow model"
    ):
        LitEDM(WatchedNet(), OneSample()).check_checkpoint(saved)


def test_steps_the_sampler_cannot_take_are_refused_at_start():
    model = LitFlow(unet(), OneSample())
    with pytest.raises(InputError, match="SampleGrid: num_steps must be at least 1, got 0"):
        train(model, Digits(batch_size=32), 1, callbacks=[SampleGrid(4, (0,))])
    assert model.images_seen == 0


@pytest.mark.parametrize(
    "callback",
    [
        GradientAccumulationScheduler({0: 2}),
        EMAWeightAveraging(),
        StochasticWeightAveraging(1e-3, swa_epoch_start=1),
    ],
)
def test_lightnings_schedules_and_averages_are_refused(callback):
    model = LitEDM(unet(), OneSample())
    words = f"{type(callback).__name__} does not work here: "
    with pytest.raises(InputError, match=words):
        train(model, Digits(batch_size=8), 1, callbacks=[callback])


def test_a_second_fit_of_a_trainer_has_one_average_again():
    model = LitEDM(unet(), OneSample())
    trainer = train(model, Digits(batch_size=8), 1)
    trainer.fit_loop.epoch_loop.max_steps = 2
    trainer.fit(model, Digits(batch_size=8))
    assert model.images_seen >= 16
    assert sum(isinstance(each, WeightAveraging) for each in trainer.callbacks) == 1


@pytest.mark.parametrize("name", ["lr_find", "scale_batch_size"])
def test_lightning_tuner_is_refused_by_name_and_leaves_no_file(name, tmp_path):
    options = {
        **TRAINER,
        "max_steps": 2,
        "enable_checkpointing": False,
        "default_root_dir": tmp_path,
    }
    tune = getattr(Tuner(pl.Trainer(**options)), name)
    with pytest.raises(InputError, match=r"trainer.callbacks: \w+Finder does not work here: "):
        tune(LitEDM(unet(), OneSample()), datamodule=Digits(batch_size=8))
    assert not list(tmp_path.iterdir())


class Returns(nn.Module):
    """A network that returns what a function makes of its input."""

    def __init__(self, make):
        super().__init__()
        self.make, self.weight = make, nn.Parameter(torch.ones(()))

    def forward(self, z, noise_label, class_label=None):
        return self.make(self.weight * z)


class OfDiffusers(tuple):
    sample = None


@pytest.mark.parametrize("kind", [LitEDM, LitFlow, LitICT], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda z: (z,), "^Returns returns tuple, and a net must return a tensor$"),
        (OfDiffusers, "returns OfDiffusers, .*: lit_knn.nets.Diffusers wraps such a model$"),
        (lambda z: z / (z - z), "^the net's output is not finite for an image of noise"),
    ],
    ids=["tuple", "diffusers", "infinite"],
)
def test_an_output_that_is_no_finite_tensor_is_named(kind, make, message):
    module = kind(net=Returns(make), estimator=OneSample())
    with pytest.raises(InputError, match=message):
        module.set_image_shape((1, 4, 4))


def test_a_network_whose_classes_are_none_has_none():
    net = Returns(lambda z: z)
    net.num_classes = None
    assert LitEDM(net=net, estimator=OneSample()).conditioning.num_classes == 0
    assert Network(EDMPrecond(net).eval()).num_classes == 0
