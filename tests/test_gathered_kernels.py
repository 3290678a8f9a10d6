"""The Triton kernels of gathered images: in Triton's interpreter against float64, and compiled for GPUs not at hand."""

import importlib.util
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

ROOT = Path(__file__).parent.parent
SHAPE, NARROW = (3, 10, 10), (1, 7, 13)


def decoded(images):
    """Model space as PyTorch computes it on CUDA, where it multiplies by 1 / 127.5, in float32."""
    if images.dtype != torch.uint8:
        return images
    return images.float() * torch.tensor(1 / 127.5) - 1


def drawn(case):
    """The drawn images of a case, (B, n, *shape) float32, zeros where there is none, and which places hold one."""
    ids, used, stored = case["ids"], case["used"], len(case["images"])
    there = ids >= 0
    if used is not None:
        there &= torch.arange(ids.shape[1]) < used[:, None]
    x = decoded(case["images"])[ids.clamp(min=0) % stored]
    x = torch.where((ids >= stored)[..., None, None, None], x.flip(-1), x)
    return torch.where(there[..., None, None, None], x, 0.0), there


def make_case(
    seed, images=torch.uint8, shape=SHAPE, hflip=False, counted=False, source=False, z=torch.float32, t=10.0, n=11, B=3
):
    """Random draws, weights and latents; with `counted`, the unused places hold ids that are not in the set."""
    generator = torch.Generator().manual_seed(seed)
    N = 20
    stored = torch.randint(0, 256, (N, *shape), dtype=torch.uint8, generator=generator)
    if images != torch.uint8:
        stored = torch.randn(N, *shape, generator=generator)
    ids = torch.randint(N * (1 + hflip), (B, n), generator=generator)
    ids[0, 0] = 0 if not hflip else N
    used = torch.tensor([n, 1, n // 2 + 1])[:B] if counted else None
    if counted:
        ids[torch.arange(n) >= used[:, None]] = 10**12
    case = {"images": stored, "ids": ids, "used": used, "width": shape[-1] if hflip else 0, "source": None}
    case["behind"] = 0
    x, there = drawn({**case, "ids": torch.where(ids < 10**12, ids, -1)})
    if source:
        case["source"] = torch.randn(B, *shape, generator=generator)
        there = torch.cat([torch.ones(B, 1, dtype=torch.bool), there], 1)
    weights = torch.randn(there.shape, generator=generator, dtype=torch.float64) * 3
    case["weights"] = torch.softmax(weights.masked_fill(~there, -torch.inf), 1)
    case["z"] = (x[:, 0] + t * torch.randn(B, *shape, generator=generator)).to(z)
    return case


CASES = {
    "pixels": make_case(0),
    "pixels, small t": make_case(1, t=0.002),
    "mirrored": make_case(2, hflip=True, t=0.002),
    "mirrored, counted, source": make_case(3, hflip=True, counted=True, source=True, n=19),
    "counted": make_case(4, counted=True, t=0.002, n=33),
    "source": make_case(5, source=True),
    "odd shape": make_case(6, shape=NARROW, hflip=True, t=0.1),
    "floats": make_case(7, images=torch.float32, t=0.002),
    "floats, mirrored, source": make_case(8, images=torch.float32, hflip=True, source=True),
    "float64 latents": make_case(9, z=torch.float64, hflip=True, t=0.002),
    "float16 latents": make_case(10, z=torch.float16),
    "bfloat16 latents": make_case(11, z=torch.bfloat16),
    "one draw": make_case(12, n=1, B=1),
    "int32 ids": {**(case := make_case(13)), "ids": case["ids"].int()},
    "no image": {**(case := make_case(14)), "ids": torch.where(torch.arange(11) == 4, -1, case["ids"])},
    "copies": {**(case := make_case(15)), "ids": case["ids"][:, :1].expand(-1, 11)},
    # A view of part of each image: its rows lie apart.
    "rows apart": {**(case := make_case(18)), "images": torch.cat([case["images"]] * 2, 1)[:, :3]},
    # Offsets beyond 2^31.
    "far behind": {**(case := make_case(19)), "ids": case["ids"].int(), "behind": 2**31 // 300},
}
for name, hflip in (("near copies", False), ("near copies, mirrored", True)):
    CASES[name] = case = make_case(16, hflip=hflip, t=0.002)
    # Each image is the first one, with one pixel that is one level off.
    case["images"][:] = case["images"][:1]
    case["images"].flatten(1)[torch.arange(20), torch.arange(20) * 7] ^= 1
    x, _ = drawn(case)
    case["z"] = x[:, 0] + 0.002 * torch.randn(x[:, 0].shape, generator=torch.Generator().manual_seed(17))
CASES["no image"]["weights"][:, 4] = 0.0
CASES["no image"]["weights"] /= CASES["no image"]["weights"].sum(1, keepdim=True)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Results of the interpreted kernels, by the names of `CASES`."""
    folder = tmp_path_factory.mktemp("interpreted")
    torch.save(list(CASES.values()), folder / "cases.pt")
    command = [sys.executable, "-m", "tests.interpreted_kernels", folder / "cases.pt", folder / "results.pt"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if "No module named 'triton" in run.stderr:
        pytest.skip(f"Triton cannot be imported: {run.stderr.splitlines()[-1]}")
    assert run.returncode == 0, run.stderr
    return dict(zip(CASES, torch.load(folder / "results.pt", weights_only=True), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_distances_equal_enumerated_ones(found, name):
    case = CASES[name]
    x, there = drawn(case)
    expected = (x.double() - case["z"].double()[:, None]).square().flatten(2).sum(2)
    assert torch.equal(found[name]["sq_dist"].isinf(), ~there)
    # float32 holds the differences to 6e-8 of themselves; the sum must not lose more.
    tolerance = 1e-15 if case["z"].dtype == torch.float64 else 2e-7
    torch.testing.assert_close(found[name]["sq_dist"][there], expected[there], rtol=tolerance, atol=0)


@pytest.mark.parametrize("name", CASES)
def test_means_equal_enumerated_ones(found, name):
    case = CASES[name]
    x, _ = drawn(case)
    if case["source"] is not None:
        x = torch.cat([case["source"][:, None], x], 1)
    expected = (case["weights"][..., None, None, None] * x.double()).sum(1).flatten(1)
    torch.testing.assert_close(found[name]["mean"], expected, rtol=0, atol=2e-7 * float(x.abs().max()))


def test_the_mean_of_copies_of_an_image_is_that_image(found):
    x, _ = drawn(CASES["copies"])
    assert torch.equal(found["copies"]["mean"], x[:, 0].flatten(1).double())


@pytest.mark.parametrize("name", ["near copies", "near copies, mirrored"])
def test_weights_of_near_copies_at_the_smallest_noise_level_equal_enumerated_ones(found, name):
    # The likelihoods of near copies differ by the last digits of their distances.
    x, _ = drawn(CASES[name])
    exact = (x.double() - CASES[name]["z"].double()[:, None]).square().flatten(2).sum(2)
    expected, weights = (torch.softmax(-d / (2 * 0.002**2), 1) for d in (exact, found[name]["sq_dist"]))
    assert (expected > 0.01).sum() > 3
    torch.testing.assert_close(weights, expected, rtol=0, atol=1e-4)


# The first name of each kernel's arguments by type; the others are int32 sizes.
POINTERS = {"images": "*u8", "ids": "*i64", "used": "*i64", "heaviest": "*i64", "z": "*fp32", "source": "*fp32"}
POINTERS |= {"weights": "*fp64", "out": "*fp64"}
SIZES = ("n", "d", "stored", "width")
CHOICES = {
    "pixels": {"PIXELS": True, "MIRRORED": False, "COUNTED": False, "SOURCE": False},
    "pixels, all": {"PIXELS": True, "MIRRORED": True, "COUNTED": True, "SOURCE": True},
    "floats, all": {"PIXELS": False, "MIRRORED": True, "COUNTED": True, "SOURCE": True},
}


def kernels(images):
    """Each kernel with its tile for a type of images."""
    import triton

    from lit_knn.reference import gathered_kernels as module

    launched = [k for k in vars(module).values() if isinstance(k, triton.JITFunction) and "out" in k.arg_names]
    tiles = [module.MEAN_TILES if "weights" in k.arg_names else module.SQ_DIST_TILES for k in launched]
    return [(kernel, tile[images], module.EXACT) for kernel, tile in zip(launched, tiles, strict=True)]


def compiled(kernel, tile, exact, choices, capability):
    """The code of a kernel, in several languages, for a GPU that need not be there."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = POINTERS | dict.fromkeys(SIZES, "i32") | ({} if choices["PIXELS"] else {"images": "*fp32"})
    names = kernel.arg_names
    constants = {(i,): {**choices, **tile}[name] for i, name in enumerate(names) if name not in types}
    # Sets and sizes that 16 divides: tensors of PyTorch begin at such addresses.
    even = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in POINTERS or name == "d"}
    source = ASTSource(kernel, {name: types.get(name, "constexpr") for name in names}, constants, even)
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target, {"num_warps": tile["num_warps"], **exact}).asm


@pytest.mark.parametrize("capability", [80, 90, 120])
@pytest.mark.parametrize("name", CHOICES)
def test_the_kernels_compile_for_a_gpu_without_spills(name, capability, tmp_path, monkeypatch):
    import triton

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    reader = Path(inspect.getfile(triton)).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    both = kernels(torch.uint8 if CHOICES[name]["PIXELS"] else torch.float32)
    assert len(both) == 2
    for kernel, tile, exact in both:
        code = compiled(kernel, tile, exact, CHOICES[name], capability)
        # 16 pixels, or 4 floats, in one load; and no product is fused with the sum that `to_model_space` rounds.
        assert "ld.global.v4.b32" in code["ptx"]
        assert "fma.rn.f32" not in code["ptx"]
        if not reader.exists():
            pytest.skip(f"both kernels compile, but this Triton has no {reader.name} that would tell of spills")
        (tmp_path / "kernel.cubin").write_bytes(code["cubin"])
        command = [reader, "-res-usage", tmp_path / "kernel.cubin"]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        print(capability, name, told)
        assert re.findall(r"STACK:(\d+) .*LOCAL:(\d+)", told) == [("0", "0")], told
