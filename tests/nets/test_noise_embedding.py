"""Consistency training needs a noise embedding that changes little in one grid step and much over the whole grid.

Student and teacher are one step apart (Eq. 7, eq:CM). If their embeddings are unrelated they cannot agree; if all
levels look alike the network does not know the noise (Song & Dhariwal 2023, Section 3.1).
"""

import importlib

import pytest
import torch
from torch.nn.functional import cosine_similarity

from lit_knn.nets.precond import ConsistencyFunction
from lit_knn.sampling.noise_grid import karras_sigmas
from lit_knn.sampling.schedules import ict_num_steps
from tests.config_files import CONFIGS, RUNS, resolved

# The embedding does not depend on these options, and making a full network would take seconds.
SMALL = {"blocks": 1, "multipliers": [1], "attention_at": [], "depth": 1}
ICT_RUNS = [path for path in RUNS if resolved(path)["model"]["class_path"].endswith("LitICT")]

# Models of diffusers have their library's embedding, of the timesteps that they were made for.
LISTED = [
    path
    for path in sorted((CONFIGS / "models").glob("*.yaml"))
    if not path.stem.startswith("diffusers")
]


class Found(Exception):
    pass


def embeddings(net, sigmas, sigma_min):
    """The network's own embeddings of the levels; the consistency function converts the levels first."""

    def stop(module, inputs, output):
        raise Found(output)

    (net.map_noise if hasattr(net, "map_noise") else net.embedding.waves).register_forward_hook(
        stop
    )
    function = ConsistencyFunction(net.eval(), sigma_min=sigma_min)
    size = getattr(net, "image_size", 8)
    with pytest.raises(Found) as found, torch.no_grad():
        function(torch.zeros(len(sigmas), net.in_channels, size, size), sigmas)
    return found.value.args[0].double()


def check(part, levels, sigma_min=0.002, sigma_max=80.0, rho=7.0):
    module, _, name = part["class_path"].rpartition(".")
    options = {
        **part["init_args"],
        **{key: value for key, value in SMALL.items() if key in part["init_args"]},
    }
    net = getattr(importlib.import_module(module), name)(**options)
    for number in levels:
        embedded = embeddings(net, karras_sigmas(number, sigma_min, sigma_max, rho), sigma_min)
        adjacent = cosine_similarity(embedded[1:], embedded[:-1])
        step = (embedded[1:] - embedded[:-1]).norm(dim=1) / embedded.norm(dim=1).mean()
        # The cosine is at least 0.95 at N = 11; its distance to 1 falls with the square of the step.
        assert 1 - adjacent.min() < 0.05 * (10 / (number - 1)) ** 2, (number, adjacent.min())
        # In float32 neighbours differ clearly, and the two ends differ much.
        assert step.min() > 1e-5
        assert cosine_similarity(embedded[0], embedded[-1], dim=0) < 0.98


@pytest.mark.parametrize("path", ICT_RUNS, ids=lambda path: str(path.relative_to(CONFIGS)))
def test_adjacent_level_embeddings_are_near_in_every_ict_run(path):
    options = resolved(path)["model"]["init_args"]
    s0, s1, total = options["s0"], options["s1"], options["total_steps"]
    levels = sorted(
        {ict_num_steps(step, total, s0, s1) for step in range(0, total, max(total // 16, 1))}
    )
    assert (levels[0], levels[-1]) == (11, s1 + 1)
    grid = {name: options[name] for name in ("sigma_min", "sigma_max", "rho") if name in options}
    check(options["net"], levels, **grid)


@pytest.mark.parametrize("path", LISTED, ids=lambda path: path.stem)
def test_so_are_they_in_every_network_that_could_take_its_place(path):
    part = resolved(path)
    check(part, (11, 1281))
    if "fourier_scale" in part["init_args"]:
        # The scale of diffusion models makes neighbours unrelated.
        part["init_args"]["fourier_scale"] = 16.0
        with pytest.raises(AssertionError):
            check(part, (11,))
