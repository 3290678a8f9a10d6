"""Any network file becomes a denoiser, ready to evaluate."""

import math

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from lit_knn.commands.entry import main
from lit_knn.common.errors import InputError
from lit_knn.estimators import Exact, Network, Switched
from lit_knn.nets import ADM, DDPMpp, UNet
from lit_knn.nets.base import NO_CLASS
from lit_knn.nets.flow import VelocityOutput
from lit_knn.nets.precond import ConsistencyFunction, EDMPrecond
from lit_knn.reference import ReferenceSet
from lit_knn.sampling import ConsistencyModel
from lit_knn.sampling.loading import convert, load, load_network
from lit_knn.sampling.model_files import write_exported
from tests.edm_pickles import Call, edm_network, published, state_of, write
from tests.image_files import refusal
from tests.networks import small_published, write_own, write_published, write_start

Z, SIGMA = (
    torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(1)),
    torch.tensor([0.1, 2.0, 50.0]),
)
LABELS = torch.tensor([0, 2, 1])


def small(family=DDPMpp, **options):
    options = {
        "image_size": 16,
        "channels": 64 if family is ADM else 8,
        "num_classes": 3,
        **options,
    }
    return small_published(family, **options)


def evaluated(net, labels=LABELS, sigma_data=0.5):
    with torch.no_grad():
        return EDMPrecond(net.eval(), sigma_data)(Z, SIGMA, labels)


@pytest.mark.parametrize("family", [DDPMpp, ADM])
def test_every_kind_of_file_gives_the_network_written(family, tmp_path):
    net = small(family, dropout=0.5)
    expected = evaluated(net)
    files = [tmp_path / f"a.{kind}" for kind in ("pkl", "safetensors", "ckpt")]
    write_published(files[0], net)
    convert(*files[:2])
    write_start(files[2], net, image_shape=(3, 16, 16))
    state = torch.get_rng_state()
    for file in files:
        denoiser, network = load_network(file), Network(file)
        assert type(denoiser) is EDMPrecond
        assert type(denoiser.model) is family
        assert not any(module.training for module in denoiser.modules())
        weights = [*denoiser.parameters(), *denoiser.buffers()]
        assert not any(weight.requires_grad for weight in weights)
        assert {(weight.dtype, weight.device.type) for weight in weights} == {
            (torch.float32, "cpu")
        }
        without = torch.full((len(Z),), NO_CLASS)
        unlabelled = network.posterior_mean(Z, SIGMA, labels=without)
        for output in (denoiser(Z, SIGMA, LABELS), network.posterior_mean(Z, SIGMA, labels=LABELS)):
            torch.testing.assert_close(output, expected, rtol=0, atol=0)
            assert not output.requires_grad
        # The labels of one call do not stay for the next.
        assert torch.equal(network.posterior_mean(Z, SIGMA, labels=without), unlabelled)
        if file.suffix != ".ckpt":  # This checkpoint does not say whether the training hid labels.
            with pytest.raises(
                InputError, match="labels missing, and the net was never trained without"
            ):
                network.posterior_mean(Z, SIGMA)
        assert not torch.equal(unlabelled, expected)
    # loading a file must not change a seeded run's draws
    assert torch.equal(torch.get_rng_state(), state)


def test_weights_are_float32_whatever_the_file_has(tmp_path):
    stored = small().half()
    path, out = tmp_path / "a.pkl", tmp_path / "a.safetensors"
    write(path, published(edm_network(stored, use_fp16=True, sigma_data=0.3)))
    model, denoiser = convert(path, out), load_network(path)
    assert {weight.dtype for weight in denoiser.parameters()} == {torch.float32}
    # Converting to float32 changes no digit of the file's weights. The deviation of the data is the file's, too.
    expected = evaluated(stored.float(), sigma_data=0.3)
    torch.testing.assert_close(denoiser(Z, SIGMA, LABELS), expected, rtol=0, atol=0)
    assert denoiser.sigma_data == 0.3
    assert load(out).description() == model.description() == load(path).description()
    assert all(
        torch.equal(value, stored.state_dict()[name]) for name, value in load_file(out).items()
    )
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.pkl", "a.safetensors"]


def test_sampler_of_published_file_keeps_its_noise_levels(tmp_path):
    ema = edm_network(small())
    state_of(ema).update(sigma_min=0.05, sigma_max=20)
    options = load(write(tmp_path / "a.pkl", published(ema))).options()
    assert (options["sigma_min"], options["sigma_max"]) == (0.05, 20)
    state_of(ema).update(sigma_min=0, sigma_max=math.inf)
    options = load(write(tmp_path / "a.pkl", published(ema))).options()
    assert (options["sigma_min"], options["sigma_max"]) == (0.002, 80)


def test_half_precision_is_computed_where_it_is_asked_for_alone(tmp_path):
    net = small()
    # weights of ordinary sizes, because standard normal ones overflow in half precision
    with torch.no_grad():
        for layer in net.modules():
            if isinstance(layer, nn.Conv2d | nn.Linear | nn.GroupNorm):
                layer.reset_parameters()
    path = write_published(tmp_path / "a.pkl", net, use_fp16=True)
    seen = []
    for denoiser in (
        load_network(path),
        load_network(path, fp16=True),
        Network(path, fp16=True).denoiser,
    ):
        last = [layer for layer in denoiser.model.modules() if isinstance(layer, nn.Conv2d)][-1]
        for layer in (last, denoiser.model.map_layer1):
            layer.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
        error = (denoiser(Z, SIGMA, LABELS) - evaluated(net)).norm() / evaluated(net).norm()
        assert error < 1e-2
        assert (error > 0) == denoiser.fp16
        assert {weight.dtype for weight in denoiser.parameters()} == {torch.float32}
    # The embedding comes first and is always in float32.
    assert seen == [torch.float32, torch.float32, *[torch.float32, torch.float16] * 2]


def test_an_own_checkpoint_that_tells_no_architecture_needs_it(tmp_path):
    class OwnNet(UNet):
        """A file cannot name this class."""

    path = write_start(tmp_path / "own.ckpt", OwnNet(1, channels=8, multipliers=(1, 2)))
    assert "own.ckpt: the file does not tell the architecture" in refusal(load_network, path)
    net = OwnNet(1, channels=8, multipliers=(1, 2)).double()
    denoiser = load_network(path, net)
    assert denoiser.model is net
    assert not denoiser.training
    # A given network keeps its type.
    assert {weight.dtype for weight in net.parameters()} == {torch.float64}
    stored = torch.load(path, weights_only=True)["state_dict"]
    assert all(
        torch.equal(stored[f"denoiser.{name}"], value)
        for name, value in denoiser.state_dict().items()
    )


def test_run_exported_into_its_folder_is_its_checkpoint(tmp_path):
    newest, older = (
        write_own(tmp_path / "checkpoints" / "last.ckpt"),
        load(write_own(tmp_path / "old.ckpt", seed=1)),
    )
    write_exported(tmp_path / "model.safetensors", older)
    assert torch.equal(load(tmp_path).sample([0], 1), load(newest).sample([0], 1))
    newest.unlink()
    newest.parent.rmdir()
    assert torch.equal(load(tmp_path).sample([0], 1), older.sample([0], 1))


def test_weights_that_are_not_finite_are_refused_by_name(tmp_path):
    net = small().bfloat16()
    with torch.no_grad():
        net.map_layer0.weight[2, 1] = -math.inf
    path, out = write_published(tmp_path / "a.pkl", net), tmp_path / "out.safetensors"
    for refused in (refusal(load, path), refusal(convert, path, out)):
        assert refused == f"{path}: 'map_layer0.weight' holds a weight that is not finite"
    assert not out.exists()


def test_unfitting_configuration_is_refused_by_file_name(tmp_path):
    ema = edm_network(small())
    state_of(ema, "model")["_init_kwargs"].update(num_blocks=2)
    path = write(tmp_path / "a.pkl", published(ema))
    refused = refusal(Network, path)
    assert "the weights do not fit" in refused
    assert refused.startswith(f"Network: path={path}")


def test_refused_conversion_is_one_line_and_replaces_nothing(tmp_path, capsys):
    path, out = (
        write(tmp_path / "a.pkl", Call("os", "system", f"touch {tmp_path / 'marker'}")),
        tmp_path / "out.txt",
    )
    kept = tmp_path / "kept.safetensors"
    kept.write_text("kept")
    cases = [
        (
            kept.with_name("new.safetensors"),
            f"error: {path} names the global os.system, which is refused\n",
        ),
        (kept, f"error: {kept} exists already, and is not replaced\n"),
        (out, f"error: {out}: the output must be named .safetensors\n"),
    ]
    for target, message in cases:
        with pytest.raises(SystemExit, match="2"):
            main(["convert", str(path), str(target)])
        assert capsys.readouterr() == ("", message)
    assert kept.read_text() == "kept"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.pkl", "kept.safetensors"]


class Denoiser(nn.Module):
    """A denoiser of one's own: the posterior mean of Gaussian data, shifted by the class."""

    def __init__(self, num_classes=0):
        super().__init__()
        self.num_classes = num_classes
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, z, sigma, class_label=None):
        assert sigma.dtype == z.dtype
        shift = 0.0 if class_label is None else class_label.reshape(-1, 1, 1, 1).to(z.dtype)
        return self.weight * z / (1 + sigma.reshape(-1, 1, 1, 1) ** 2) + shift


def test_a_module_is_an_estimator_and_a_part_of_one():
    mine, z, sigma = Denoiser().eval(), Z, SIGMA
    expected = mine(Z, SIGMA).detach()
    assert torch.equal(Network(mine).posterior_mean(z, sigma), expected)
    reference = ReferenceSet(torch.randn(50, 3, 16, 16))
    exact = Exact().bind(reference).posterior_mean(z, sigma)
    for below in (mine, Network(mine)):
        switched = Switched(below=below, above=Exact(), t=2.0).bind(reference)
        # Levels 0.1, 2 and 50.
        assert torch.equal(switched.posterior_mean(z, sigma), torch.cat([expected[:1], exact[1:]]))
    conditional = Network(Denoiser(num_classes=3).eval())
    assert conditional.num_classes == 3
    for labels, shift in ((LABELS, LABELS), (None, torch.full((3,), NO_CLASS))):
        mean = conditional.posterior_mean(z, sigma, labels=labels)
        torch.testing.assert_close(mean, expected + shift.reshape(-1, 1, 1, 1))
    # The network goes on learning.
    with torch.no_grad():
        mine.weight.mul_(2)
    torch.testing.assert_close(Network(mine).posterior_mean(z, sigma), 2 * expected)


def test_a_loaded_model_is_the_estimator_of_its_file(tmp_path):
    path = write_start(tmp_path / "a.ckpt", small(), image_shape=(3, 16, 16))
    expected = Network(path).posterior_mean(Z, SIGMA, labels=LABELS)
    for module in (load(path), load_network(path)):
        assert torch.equal(Network(module).posterior_mean(Z, SIGMA, labels=LABELS), expected)


def test_a_module_that_is_no_denoiser_is_refused():
    raw = UNet(3, channels=8).eval()
    for module in (
        raw,
        ConsistencyFunction(raw),
        VelocityOutput(raw),
        ConsistencyModel(ConsistencyFunction(raw), (3, 16, 16)),
    ):
        with pytest.raises(
            InputError,
            match=rf"Network: {type(module).__name__} is no denoiser D\(z, sigma\): give",
        ):
            Switched(module, Exact(), 1.0)
    with pytest.raises(InputError, match="net and fp16 are options of files"):
        Network(EDMPrecond(raw), fp16=True)
    with pytest.raises(
        InputError, match=r"the module is in training mode: call its eval\(\) first"
    ):
        Network(EDMPrecond(raw).train()).posterior_mean(Z, SIGMA)
