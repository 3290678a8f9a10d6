"""Random streams that depend only on a key, so that a resumed run repeats the uninterrupted one."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

import numpy as np
import torch


class Stream(IntEnum):
    """The random streams. The key of a draw contains the number of its stream, so no two streams have equal keys.

    PyTorch's generator on the CPU keeps 32 bits of a seed. So two of many keys may share their draws by chance: about
    19 pairs of 400,000 keys do.

    The comments show the keys; · is the number of the stream. Two kinds of draws have no stream number: the noise of a
    sample, with keys (seed, number of the draw), and draws whose key is one number, such as the points of a toy set.
    """

    TRAIN = 0  # (seed, rank, batch, ·): noise levels, noise and estimates of a training step
    VALIDATION = 1  # (seed, rank, batch, ·): the same for a validation step
    DROPOUT = 2  # (key of the step, ·): dropout masks
    SAMPLING = 3  # (seed, first sample, ·): an estimator that samples
    CLASS = 4  # (seed of the sample, ·, 0): the class of a sample
    AUGMENTATION = 5  # (key of the step, ·): augmentation of a training step on a GPU
    # (key of the step, ·): which labels a training step drops; (key of the step, ·, part): those of new samples
    LABEL = 6
    LATENT = 10  # (seed, ·) and (seed, latent, ·): images and noise of measured latents
    SOURCE = 11  # (seed, batch, level, ·): resampled sources of measured latents
    ESTIMATOR = 12  # (seed, batch, level, estimator, repeat, ·) and others: a measured estimator
    HYBRID = 16  # (seed, first sample, ·): the estimator that begins hybrid samples
    # (seed, first sample, ·): the images that are noised to start hybrid samples of the baseline, without an estimator
    FORWARD = 17
    NETWORK = 18  # (seed, first sample, ·): the network that ends hybrid samples
    TRAJECTORY = (
        19  # (seed, batch, estimator, ·): an estimator that samples the latents it is measured at
    )
    PROBE = 20  # (seed, ·): levels of a training that a probe is for
    ENCODING = 21  # (seed, hash of the image, ·): a draw from the posterior of an autoencoder
    HALVES = 22  # (seed, split, ·): halves of measured samples
    # (seed, ·) and (seed, step, ·): start, levels and noise of free particles, and their estimators
    PARTICLES = 23
    HELD_OUT = 0x68656C64  # (·, 0): which images are held out
    # (·, 0): representative subset of a set, for its components or the training of its index
    SUBSET = 0x737562736574
    TRAINING_ORDER = 0x747261696E  # (·, seed, epoch): order of the training images
    VALIDATION_ORDER = 0x76616C6964  # (·, seed): order of the validation images


def seed_from_key(*key: int) -> int:
    """Hash the non-negative integers in `key` to a well-mixed 63-bit seed, by NumPy's SeedSequence."""
    # SeedSequence pads keys with zeros. Without the length, (5, 1) and (5, 1, 0, 0) would give the same seed.
    sequence = np.random.SeedSequence((len(key), *key))
    bits = sequence.generate_state(1, np.uint64)[0]
    # One bit fewer, so that the seed also fits into a signed integer of 64 bits.
    return int(bits >> np.uint64(1))


def keyed_generator(device: torch.device | str, *key: int) -> torch.Generator:
    """Make a generator on `device`, seeded from `key`, for instance (seed, rank, step)."""
    return torch.Generator(device).manual_seed(seed_from_key(*key))


def subset_ids(number: int, size: int) -> torch.Tensor:
    """Return at most `size` different random ids below `number`, int64 on the CPU: the same in every process."""
    generator = keyed_generator("cpu", Stream.SUBSET, 0)
    return torch.randperm(number, device="cpu", generator=generator)[:size]


@contextmanager
def keyed_default_rng(device: torch.device, *key: int) -> Iterator[None]:
    """Seed PyTorch's default generators, from which dropout draws, inside the block and restore them after it."""
    cuda = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if cuda else []):
        # torch.manual_seed would seed the generators of all GPUs.
        torch.default_generator.manual_seed(seed_from_key(*key))
        if cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed_from_key(*key))
        yield


@contextmanager
def seeded_from(generator: torch.Generator | None) -> Iterator[None]:
    """Seed PyTorch's default generators from the state of `generator` inside the block, and restore them after it.

    If the block draws nothing from `generator`, `generator` is advanced, so that the next block gets another seed.
    """
    if generator is None:
        yield
        return
    before = generator.get_state()
    digest = hashlib.blake2b(before.numpy().tobytes(), digest_size=8).digest()
    with keyed_default_rng(generator.device, int.from_bytes(digest, "little")):
        yield
    if torch.equal(generator.get_state(), before):
        torch.rand(1, generator=generator, device=generator.device)


def rng_state(device: torch.device) -> bytes:
    """Return the state of PyTorch's default generator of a device. The state is on the CPU, so this does not wait."""
    state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
    return state.numpy().tobytes()
