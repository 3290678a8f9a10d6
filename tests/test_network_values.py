"""Network files with a noise level or a weight that no network can have: refused by every reader."""

import json
import math

import pytest
import torch
from safetensors.torch import save_file

from lit_knn.edm_checkpoint import convert, load_network_parts, main
from lit_knn.nets.published.edm_converted import FORMAT
from tests.edm_pickles import CONFIG, network, published, write
from tests.image_files import refusal

BAD_LEVELS = [("sigma_data", bad) for bad in (0, -0.5, "0.5", None, True, [0.5], math.nan, math.inf)]
BAD_LEVELS += [("sigma_min", -1), ("sigma_max", "80"), ("sigma_max", math.nan)]


def as_pickle(folder, weights, config):
    ema, _ = network(**config)
    ema.args[0]["state"]["_modules"]["model"].args[0]["state"]["_parameters"].update(weights)
    return write(folder / "a.pkl", published(ema))


def as_safetensors(folder, weights, config):
    metadata = {"format": FORMAT, "config": json.dumps({**CONFIG, **config})}
    save_file({f"model.{name}": value for name, value in weights.items()}, folder / "a.safetensors", metadata)
    return folder / "a.safetensors"


def as_checkpoint(folder, weights, config):
    named = {f"denoiser.model.{name}": value for name, value in weights.items()}
    torch.save({"state_dict": named, "hyper_parameters": config}, folder / "a.ckpt")
    return folder / "a.ckpt"


FILES = [as_pickle, as_safetensors, as_checkpoint]


@pytest.mark.parametrize("make", FILES)
@pytest.mark.parametrize(("name", "value"), BAD_LEVELS)
def test_impossible_noise_levels_are_refused(tmp_path, make, name, value):
    weights = {"weight": torch.ones(2)}
    load_network_parts(make(tmp_path, weights, {"sigma_data": 0.5, "sigma_max": math.inf, "sigma_min": 0}))
    path = make(tmp_path, weights, {name: value})
    message = refusal(load_network_parts, path)
    assert str(path) in message
    assert f"{name} must be" in message


@pytest.mark.parametrize("make", FILES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_weights_that_are_not_finite_are_refused_by_name(tmp_path, make, value, dtype):
    weight = torch.ones(3, 2, dtype=dtype)
    weight[2, 1] = value
    path = make(tmp_path, {"good": torch.ones(2), "weight": weight}, {})
    message = refusal(load_network_parts, path)
    assert str(path) in message
    assert "model.weight holds a weight that is not finite" in message


def test_the_command_converts_no_such_file(tmp_path, capsys):
    path = as_pickle(tmp_path, {"weight": torch.tensor([math.nan])}, {})
    refusal(convert, path, tmp_path / "out.safetensors")
    with pytest.raises(SystemExit) as caught:
        main([str(path), str(tmp_path / "out.safetensors")])
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: {path}: model.weight holds")
    assert not (tmp_path / "out.safetensors").exists()
