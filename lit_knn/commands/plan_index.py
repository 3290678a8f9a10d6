"""Plans the memory of an index, without building it."""

import math

import torch
from torch import Tensor

from lit_knn.commands.plan_table import Part
from lit_knn.data import DataLayout, ReferenceDataModule
from lit_knn.index import Index, default_index
from lit_knn.index.base import Vectors


class NotBuilt(Index):
    """Stands for an index that a plan does not build: it checks settings, and finds the first images."""

    def __init__(self, index: Index) -> None:
        self.index = index

    def check(self, N: int, d: int, device: torch.device | None = None, k: int = 1) -> None:
        self.index.check(N, d, device, k)

    def build(self, vectors: Vectors) -> None:
        pass

    def search(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        sq_dist = queries.new_zeros(len(queries), k)
        ids = torch.arange(k, device=queries.device)
        return sq_dist, ids.expand(len(queries), k)

    def to(self, device: torch.device) -> None:
        pass


def index_parts(
    data: ReferenceDataModule, stored: DataLayout, neighbours: int, device: torch.device, ranks: int
) -> tuple[list[Part], list[Part]]:
    """Plan the index of the images of one rank.

    Args:
        data: names the index, or leaves its choice to the device.
        stored: size and layout of the images of one rank.
        neighbours: the most neighbours that are searched per z.
        device: where the index is used.
        ranks: number of shards of the images; 1 without shards.

    Returns:
        What lies on `device`, and what lies in the machine's memory during the build.

    Raises:
        InputError: the index cannot have so many images, dimensions or neighbours.
    """
    N = stored.shape[0]
    d = math.prod(stored.shape[1:])
    index = data.index
    if index is None:
        index = default_index(device, stored.value_bytes == 1)
    index.check(N, d, device, min(neighbours, N))

    size = index.nbytes(N, d, device)
    note = _describe(index)
    if size is None:
        note += ": size NOT KNOWN, not counted"

    # With shards, each rank has its own index.
    shared = index.shared and ranks == 1
    on_cpu = device.type == "cpu"
    held = Part("index", size or 0, note, shared=shared and on_cpu, counted=size is not None)

    # Some indexes are built in the memory of the machine, whatever the device.
    if index.built_on_cpu or on_cpu:
        built = Part("index", index.nbytes(N, d, torch.device("cpu")) or 0, note, shared=shared)
    else:
        built = Part("index", 0, f"{note}, built on the device")

    sample = index.build_bytes(N, d)
    training = Part("index training", sample, "until it is built", temporary=True, shared=shared)
    return [held], [built, training]


def _describe(index: Index) -> str:
    """Return the class of an index and those of its settings that are words."""
    words = [type(index).__name__]
    for name, value in index.settings().items():
        if isinstance(value, str) and name != "cache_dir":
            words.append(value)
    return " ".join(words)
