"""The benchmark of a GPU in a process that has three packages alone."""

import sys

# These packages are not needed; torchmetrics itself imports matplotlib if it is installed.
WITHOUT = ("faiss", "torch_fidelity", "torchvision", "matplotlib", "tensorboard", "sklearn", "PIL", "safetensors")
WITHOUT += ("jsonargparse",)


def main(rank, ranks, folder, how):
    """Import the project anew, where these packages are missing, and run the benchmark without time."""
    packages = {name: name.partition(".")[0] for name in sys.modules}
    for name, package in packages.items():
        if package in ("lit_knn", "benchmarks", "callbacks", "main"):
            del sys.modules[name]
        elif package in WITHOUT:
            sys.modules[name] = None
    sys.modules.update(dict.fromkeys(WITHOUT))
    from benchmarks.gpu.__main__ import main as benchmark

    sys.exit(benchmark(["--output", str(folder / "gpu"), "--minutes", "1e-9"]))
