"""Any network file becomes a denoiser, ready to evaluate."""

import json
import time

import pytest
import torch
from torch import nn

from lit_knn.edm_checkpoint import convert, load_edm_pickle, load_network, load_network_parts
from lit_knn.errors import InputError
from lit_knn.estimators import Network
from lit_knn.nets import ADM, DDPMpp, NCSNpp, UNet
from lit_knn.nets.precond import EDMPrecond
from lit_knn.nets.published.configs import network_to_config
from lit_knn.nets.published.edm_converted import FORMAT
from tests.edm_pickles import edm_network, published, write
from tests.networks import small_published, write_own, write_published

FAMILIES = pytest.mark.parametrize("family", [DDPMpp, NCSNpp, ADM])
Z, SIGMA = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(1)), torch.tensor([0.1, 2.0, 50.0])
LABELS = torch.tensor([0, 2, 1])


def small(family=DDPMpp, **options):
    options = {"image_size": 16, "channels": 64 if family is ADM else 8, "num_classes": 3, **options}
    return small_published(family, **options)


def evaluated(net, labels=LABELS, sigma_data=0.5):
    with torch.no_grad():
        return EDMPrecond(net.eval(), sigma_data)(Z, SIGMA, labels)


def write_converted_file(path, state_dict, config):
    from safetensors.torch import save_file

    save_file(state_dict, path, {"format": FORMAT, "config": json.dumps(config)})
    return path


def every_file(folder, net):
    """The network in each kind of file."""
    pickled = write_published(folder / "a.pkl", net)
    convert(pickled, folder / "a.safetensors")
    state_dict = {f"denoiser.model.{name}": value for name, value in net.state_dict().items()}
    own = {"state_dict": state_dict, "hyper_parameters": {}, "network_config": network_to_config(net)}
    torch.save(own, folder / "a.ckpt")
    return [pickled, folder / "a.safetensors", folder / "a.ckpt"]


@FAMILIES
def test_every_kind_of_file_gives_the_network_that_was_written(family, tmp_path):
    net = small(family)
    expected = evaluated(net)
    pickled, *others = every_file(tmp_path, net)
    denoisers = [load_edm_pickle(pickled), *map(load_network, [pickled, *others])]
    for denoiser in denoisers:
        assert type(denoiser) is EDMPrecond
        assert type(denoiser.model) is family
        torch.testing.assert_close(denoiser(Z, SIGMA, LABELS), expected, rtol=0, atol=0)
    for file in (pickled, *others):
        estimate = Network(file).posterior_mean(Z, SIGMA, labels=LABELS)
        torch.testing.assert_close(estimate, expected, rtol=0, atol=0)


def test_what_comes_through_the_door_is_ready_to_evaluate(tmp_path):
    files = every_file(tmp_path, small(dropout=0.5))
    torch.manual_seed(0)
    state = torch.get_rng_state()
    for denoiser in map(load_network, files):
        assert not any(module.training for module in denoiser.modules())
        weights = [*denoiser.parameters(), *denoiser.buffers()]
        assert not any(weight.requires_grad for weight in weights)
        assert {(weight.dtype, weight.device.type) for weight in weights} == {(torch.float32, "cpu")}
        assert not denoiser(Z, SIGMA, LABELS).requires_grad
    assert torch.equal(torch.get_rng_state(), state)  # loading a file must not change a seeded run's draws


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_are_float32_whatever_the_file_has(tmp_path, dtype):
    stored = small().to(dtype)
    pickled = write(tmp_path / "a.pkl", published(edm_network(stored, use_fp16=True)))
    assert load_network_parts(pickled)[1]["model.map_layer0.weight"].dtype == dtype
    denoiser = load_edm_pickle(pickled)
    assert {weight.dtype for weight in denoiser.parameters()} == {torch.float32}
    assert denoiser(Z, SIGMA, LABELS).dtype == torch.float32
    # Converting to float32 changes no digit of the file's weights.
    torch.testing.assert_close(denoiser(Z, SIGMA, LABELS), evaluated(stored.float()), rtol=0, atol=0)


@FAMILIES
def test_half_precision_is_computed_where_it_is_asked_for_alone(family, tmp_path):
    net = small(family)
    with torch.no_grad():  # weights of ordinary sizes, because standard normal ones overflow in half precision
        for layer in net.modules():
            if isinstance(layer, nn.Conv2d | nn.Linear | nn.GroupNorm):
                layer.reset_parameters()
    path = write_published(tmp_path / "a.pkl", net, use_fp16=True)
    seen = []
    for denoiser in (load_network(path), load_edm_pickle(path, fp16=True), Network(path, fp16=True).denoiser):
        last = [layer for layer in denoiser.model.modules() if isinstance(layer, nn.Conv2d)][-1]
        embedded = denoiser.model.map_layer1
        for layer in (last, embedded):
            layer.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
        error = (denoiser(Z, SIGMA, LABELS) - evaluated(net)).norm() / evaluated(net).norm()
        assert error < 1e-2
        assert (error > 0) == denoiser.fp16
        assert {weight.dtype for weight in denoiser.parameters()} == {torch.float32}
    # The embedding comes first and is always in float32.
    assert seen == [torch.float32, torch.float32, *[torch.float32, torch.float16] * 2]


def test_half_precision_survives_the_estimator_which_turns_autocast_off(tmp_path):
    path = write_published(tmp_path / "a.pkl", small())
    full, half = (Network(path, fp16=fp16).posterior_mean(Z, SIGMA, labels=LABELS) for fp16 in (False, True))
    assert half.dtype == full.dtype == torch.float32
    assert not torch.equal(full, half)


def test_the_files_standard_deviation_of_the_data_is_used(tmp_path):
    net = small()
    path = write(tmp_path / "a.pkl", published(edm_network(net, sigma_data=0.3)))
    torch.testing.assert_close(load_network(path)(Z, SIGMA, LABELS), evaluated(net, sigma_data=0.3))
    assert load_network(path).sigma_data == 0.3


def test_an_own_checkpoint_that_tells_no_architecture_needs_it(tmp_path):
    path = write_own(tmp_path / "own.ckpt")
    with pytest.raises(InputError, match=r"own\.ckpt does not tell its architecture: give net"):
        load_network(path)
    net = UNet(1, channels=8, multipliers=(1, 2), blocks=1)
    denoiser = load_network(path, net)
    assert denoiser.model is net
    assert not denoiser.training
    # A given network keeps its type.
    assert load_network(path, net.double()).model.state_dict().keys() == net.state_dict().keys()
    assert {weight.dtype for weight in net.parameters()} == {torch.float64}
    stored = torch.load(path, weights_only=True)["state_dict"]
    assert all(torch.equal(stored[f"denoiser.{name}"], value) for name, value in denoiser.state_dict().items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sigma_data": 0}, "sigma_data must be a positive number, got 0"),
        ({"sigma_data": True}, "sigma_data must be a positive number, got True"),
        ({"sigma_data": [0.5]}, r"sigma_data must be a positive number, got \[0.5\]"),
        ({"sigma_data": float("nan")}, "sigma_data must be a positive number, got nan"),
        ({"sigma_data": float("inf")}, "sigma_data must be a positive number, got inf"),
        ({"num_blocks": 10**9}, "num_blocks=1000000000 is more than"),
        ({"num_blocks": 2}, "does not fit the architecture"),
        ({"num_blocks": "2"}, "an option of the wrong type"),
        ({"model_channels": 2**40}, "does not fit the architecture"),
        ({"model_channels": 2**62}, "does not fit the architecture"),
        ({"model_type": "UNet"}, "model_type must be one of SongUNet, DhariwalUNet"),
        ({"colour": "blue"}, "has no option colour"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused_at_once_by_the_files_name(tmp_path, change, message):
    config, state_dict = load_network_parts(write_published(tmp_path / "a.pkl", small()))
    path = write_converted_file(tmp_path / "bad.safetensors", state_dict, {**config, **change})
    start = time.monotonic()
    with pytest.raises(InputError, match=message) as caught:
        load_network(path)
    assert time.monotonic() - start < 5
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match=message) as caught:
        Network(path)
    assert str(caught.value).startswith(f"Network: path={path}")


@pytest.mark.parametrize("change", ["missing", "unexpected", "shape", "integers"])
def test_weights_that_do_not_fit_are_refused(tmp_path, change):
    config, state_dict = load_network_parts(write_published(tmp_path / "a.pkl", small()))
    name = "model.map_layer0.weight"
    if change == "missing":
        del state_dict[name]
    elif change == "unexpected":
        state_dict["model.colour"] = torch.ones(1)
    else:
        state_dict[name] = state_dict[name][:, :-1].clone() if change == "shape" else state_dict[name].int()
    path = write_converted_file(tmp_path / "bad.safetensors", state_dict, config)
    with pytest.raises(InputError, match=r"bad\.safetensors does not fit the architecture"):
        load_network(path)


def test_what_is_no_network_file_is_refused_with_the_option(tmp_path):
    for name, message in [("a.pt", "must be one of"), ("a.pkl", "no such file"), ("a.ckpt", "no such file")]:
        with pytest.raises(InputError, match=f"^Network: path={tmp_path / name}.*{message}"):
            Network(tmp_path / name)
    pickled = write_published(tmp_path / "a.pkl", small())
    convert(pickled, tmp_path / "a.safetensors")
    with pytest.raises(InputError, match=r"a\.safetensors is not a pickle"):
        load_edm_pickle(tmp_path / "a.safetensors")


def test_the_labels_of_one_call_do_not_stay_for_the_next(tmp_path):
    network = Network(write_published(tmp_path / "a.pkl", small()))
    before = network.posterior_mean(Z, SIGMA)
    labelled = network.posterior_mean(Z, SIGMA, labels=LABELS)
    assert not torch.equal(labelled, before)
    assert torch.equal(network.posterior_mean(Z, SIGMA), before)
