"""Any network file becomes a denoiser, ready to evaluate."""

import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from lit_knn.commands.entry import main
from lit_knn.common.checkpoint_file import MODEL_KEY
from lit_knn.common.errors import InputError
from lit_knn.estimators import Network
from lit_knn.nets import ADM, ConvUNet, DDPMpp, NCSNpp
from lit_knn.nets.precond import EDMPrecond
from lit_knn.sampling.loading import convert, load, load_network, load_network_to_tune
from tests.edm_pickles import Call, edm_network, published, write
from tests.image_files import refusal
from tests.networks import small_published, write_own, write_published, write_start

FAMILIES = pytest.mark.parametrize("family", [DDPMpp, NCSNpp, ADM])
Z, SIGMA = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(1)), torch.tensor([0.1, 2.0, 50.0])
LABELS = torch.tensor([0, 2, 1])


def small(family=DDPMpp, **options):
    options = {"image_size": 16, "channels": 64 if family is ADM else 8, "num_classes": 3, **options}
    return small_published(family, **options)


def evaluated(net, labels=LABELS, sigma_data=0.5):
    with torch.no_grad():
        return EDMPrecond(net.eval(), sigma_data)(Z, SIGMA, labels)


def every_file(folder, net):
    """The network in each kind of file."""
    pickled = write_published(folder / "a.pkl", net)
    convert(pickled, folder / "a.safetensors")
    return [pickled, folder / "a.safetensors", write_start(folder / "a.ckpt", net, image_shape=(3, 16, 16))]


@FAMILIES
def test_every_kind_of_file_gives_the_network_that_was_written_ready_to_evaluate(family, tmp_path):
    net = small(family, dropout=0.5)
    expected = evaluated(net)
    files = every_file(tmp_path, net)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    for file in files:
        denoiser = load_network(file)
        assert type(denoiser) is EDMPrecond
        assert type(denoiser.model) is family
        assert not any(module.training for module in denoiser.modules())
        weights = [*denoiser.parameters(), *denoiser.buffers()]
        assert not any(weight.requires_grad for weight in weights)
        assert {(weight.dtype, weight.device.type) for weight in weights} == {(torch.float32, "cpu")}
        for output in (denoiser(Z, SIGMA, LABELS), Network(file).posterior_mean(Z, SIGMA, labels=LABELS)):
            torch.testing.assert_close(output, expected, rtol=0, atol=0)
            assert not output.requires_grad
    assert torch.equal(torch.get_rng_state(), state)  # loading a file must not change a seeded run's draws


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_are_float32_whatever_the_file_has(tmp_path, dtype):
    stored = small().to(dtype)
    denoiser = load_network(write(tmp_path / "a.pkl", published(edm_network(stored, use_fp16=True, sigma_data=0.3))))
    assert {weight.dtype for weight in denoiser.parameters()} == {torch.float32}
    # Converting to float32 changes no digit of the file's weights. The deviation of the data is the file's, too.
    expected = evaluated(stored.float(), sigma_data=0.3)
    torch.testing.assert_close(denoiser(Z, SIGMA, LABELS), expected, rtol=0, atol=0)
    assert denoiser.sigma_data == 0.3


@FAMILIES
def test_half_precision_is_computed_where_it_is_asked_for_alone(family, tmp_path):
    net = small(family)
    with torch.no_grad():  # weights of ordinary sizes, because standard normal ones overflow in half precision
        for layer in net.modules():
            if isinstance(layer, nn.Conv2d | nn.Linear | nn.GroupNorm):
                layer.reset_parameters()
    path = write_published(tmp_path / "a.pkl", net, use_fp16=True)
    seen = []
    for denoiser in (load_network(path), load_network(path, fp16=True), Network(path, fp16=True).denoiser):
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


def test_an_own_checkpoint_that_tells_no_architecture_needs_it(tmp_path):
    net = ConvUNet(1, channels=8, multipliers=(1, 2))
    path = write_start(tmp_path / "own.ckpt", net)
    with pytest.raises(InputError, match=r"own\.ckpt: the file does not tell the architecture .*: give net"):
        load_network(path)
    net = ConvUNet(1, channels=8, multipliers=(1, 2))
    denoiser = load_network(path, net)
    assert denoiser.model is net
    assert not denoiser.training
    # A given network keeps its type.
    assert load_network(path, net.double()).model.state_dict().keys() == net.state_dict().keys()
    assert {weight.dtype for weight in net.parameters()} == {torch.float64}
    stored = torch.load(path, weights_only=True)["state_dict"]
    assert all(torch.equal(stored[f"denoiser.{name}"], value) for name, value in denoiser.state_dict().items())


def test_a_consistency_model_has_no_denoiser(tmp_path):
    path = write_own(tmp_path / "own.ckpt")
    levels = {"sigma_data": 0.5, "sigma_min": 0.002, "sampling_sigmas": [80.0], "num_steps": 1, "sampling_class": None}
    checkpoint = torch.load(path, weights_only=True)
    checkpoint[MODEL_KEY].update(kind="consistency", options=levels)
    torch.save(checkpoint, path)
    load(path)
    for loader in (load_network, load_network_to_tune, Network):
        assert "a consistency model has no denoiser" in refusal(loader, path)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(math.nan, torch.float32), (math.inf, torch.float16), (-math.inf, torch.bfloat16), (math.nan, torch.float64)],
)
def test_weights_that_are_not_finite_are_refused_by_name(tmp_path, value, dtype):
    net = small().to(dtype)
    with torch.no_grad():
        net.map_layer0.weight[2, 1] = value
    paths = [write_published(tmp_path / "a.pkl", net), write_start(tmp_path / "a.ckpt", net, image_shape=(3, 16, 16))]
    for path in paths:
        assert refusal(load, path) == f"{path}: 'map_layer0.weight' holds a weight that is not finite"
    assert "not finite" in refusal(convert, paths[0], tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_blocks": 10**9}, "blocks must be at most 100"),
        ({"num_blocks": 2}, "the weights do not fit the architecture"),
        ({"num_blocks": "2"}, "cannot have the options"),
        ({"model_channels": 2**62}, "cannot have the options"),
        ({"img_resolution": 16.5}, "image_size"),
        ({"img_channels": 0}, "in_channels"),
        ({"label_dim": -1}, "num_classes must be at least 0"),
        ({"label_dropout": math.nan}, "cannot have the options"),
        ({"colour": "blue"}, "has no option colour"),
        ({"resample_filter": [1, 2, 1]}, r"neither DDPM\+\+ nor NCSN\+\+"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused_at_once_by_the_files_name(tmp_path, changes, message):
    ema = edm_network(small())
    ema.args[0]["state"]["_init_kwargs"].update(changes)
    path = write(tmp_path / "a.pkl", published(ema))
    with pytest.raises(InputError, match=message) as caught:
        load_network(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match=message) as caught:
        Network(path)
    assert str(caught.value).startswith(f"Network: path={path}")


@pytest.mark.parametrize("damage", ["missing", "unexpected", "shape", "integers"])
def test_weights_that_do_not_fit_are_refused(tmp_path, damage):
    path, name = write_start(tmp_path / "a.ckpt", small(), image_shape=(3, 16, 16)), "denoiser.model.map_layer0.weight"
    checkpoint = torch.load(path, weights_only=True)
    weight = checkpoint["state_dict"].pop(name)
    added = {"unexpected": {name: weight, "denoiser.model.colour": torch.ones(1)}}
    added |= {"missing": {}, "shape": {name: weight[:, :-1].clone()}, "integers": {name: weight.int()}}
    checkpoint["state_dict"].update(added[damage])
    torch.save(checkpoint, path)
    with pytest.raises(InputError, match=r"a\.ckpt: the weights do not fit the architecture"):
        load_network(path)


# Conversion


def test_conversion_keeps_every_weight(tmp_path):
    net = small().half()
    path, out = write_published(tmp_path / "edm.pkl", net), tmp_path / "out.safetensors"
    model = convert(path, out)
    assert load(out).description() == model.description() == load(path).description()
    found = load_file(out)
    assert found.keys() == net.state_dict().keys()
    assert all(torch.equal(found[name], value.float()) for name, value in net.state_dict().items())
    assert sorted(file.name for file in tmp_path.iterdir()) == ["edm.pkl", "out.safetensors"]


def test_damaged_or_foreign_safetensors_are_refused(tmp_path):
    out, bad = tmp_path / "out.safetensors", tmp_path / "bad.safetensors"
    convert(write_published(tmp_path / "edm.pkl", small()), out)
    for end in (0, 5, 100, out.stat().st_size - 1):
        bad.write_bytes(out.read_bytes()[:end])
        assert "is not a safetensors file, or a damaged one" in refusal(load, bad)
    told = {"format": "lit_knn.generative_model", "format_version": "1"}
    for metadata, message in [
        (None, "is not a model that lit_knn exported or converted"),
        (told, "holds no description"),
        ({**told, "model": "[" * 100_000}, "holds no description"),
        ({**told, "model": "[]"}, "holds no description"),
        ({**told, "model": "{}"}, "kind must be one of"),
    ]:
        save_file({"a": torch.ones(1)}, bad, metadata=metadata)
        assert message in refusal(load, bad)


def test_bad_input_to_the_command_is_one_line_and_status_2(tmp_path, capsys):
    path = write(tmp_path / "a.pkl", Call("os", "system", f"touch {tmp_path / 'marker'}"))
    with pytest.raises(SystemExit) as stopped:
        main(["convert", str(path), str(tmp_path / "out.safetensors")])
    assert stopped.value.code == 2
    output = capsys.readouterr()
    assert output.err == f"error: {path} names the global os.system, which is refused\n"
    assert not output.out
    assert [file.name for file in tmp_path.iterdir()] == ["a.pkl"]


def test_the_labels_of_one_call_do_not_stay_for_the_next(tmp_path):
    network = Network(write_published(tmp_path / "a.pkl", small()))
    before = network.posterior_mean(Z, SIGMA)
    labelled = network.posterior_mean(Z, SIGMA, labels=LABELS)
    assert not torch.equal(labelled, before)
    assert torch.equal(network.posterior_mean(Z, SIGMA), before)
