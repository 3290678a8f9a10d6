"""Random streams that depend only on a key, so that a resumed run repeats the uninterrupted one."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

import numpy as np
import torch


class Stream(IntEnum):
    """Every random stream. Its number is a part of its keys, so that no two streams share their draws."""

    TRAIN = 0
    """Noise levels, noise and estimates of a training step; keys are (seed, rank, batch, stream)."""
    VALIDATION = 1
    """The same of a validation step."""
    DROPOUT = 2
    """Dropout masks; the key is that of a step, and this number."""
    SAMPLING = 3
    """Draws of an estimator that samples."""
    CLASS = 4
    """The class of a sample; the key begins with its seed."""
    AUGMENTATION = 5
    """Augmentation of a training step on a GPU; the key is that of the step, and this number."""
    LABEL = 6
    """Which labels a training step drops; the key is that of the step, and this number."""
    LATENT = 10
    """Images and noise of measured latents."""
    SOURCE = 11
    """Resampled sources of measured latents."""
    ESTIMATOR = 12
    """Draws of a measured estimator."""
    AGREEMENT = 13
    """Draws of estimators that are compared with networks."""
    SAME_NOISE = 14
    """Draws of estimators that sample from the noise of a network's samples."""
    CALIBRATION = 15
    """Latents of a calibration of sizes."""
    HYBRID = 16
    """Draws of the estimator that begins hybrid samples."""
    FORWARD = 17
    """Noise that takes images to the switch of hybrid samples."""
    NETWORK = 18
    """Draws of what ends hybrid samples."""
    ORDER = 19
    """Order of the latents in a repeat of the referee."""
    BEHAVIOUR = 30
    """Latents of the referee's examination of behaviour."""
    HELD_OUT = 0x68656C64
    """Which images are held out; this number and the next two come first in their keys."""
    TRAINING_ORDER = 0x747261696E
    """Order of the training images; keys are (stream, seed, epoch)."""
    VALIDATION_ORDER = 0x76616C6964
    """Order of the validation images."""


def seed_from_key(*key: int) -> int:
    """Hash the non-negative integers in `key` to a well-mixed 63-bit seed, by NumPy's SeedSequence."""
    # SeedSequence pads with zeros. Without the length, (5, 1) and (5, 1, 0, 0) would give the same seed.
    return int(np.random.SeedSequence((len(key), *key)).generate_state(1, np.uint64)[0] >> np.uint64(1))


def keyed_generator(device: torch.device | str, *key: int) -> torch.Generator:
    """Make a generator on `device`, seeded from `key`, for instance (seed, rank, step)."""
    return torch.Generator(device).manual_seed(seed_from_key(*key))


@contextmanager
def keyed_default_rng(device: torch.device, *key: int) -> Iterator[None]:
    """Seed PyTorch's default generators from `key` inside the block and restore them after it.

    Dropout draws only from the default generator, so this lets two forward passes share their masks.
    """
    cuda = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if cuda else []):
        # torch.manual_seed would seed the generators of all GPUs.
        torch.default_generator.manual_seed(seed_from_key(*key))
        if cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed_from_key(*key))
        yield


@contextmanager
def following(generator: torch.Generator | None) -> Iterator[None]:
    """Seed PyTorch's default generators from the state of `generator` inside the block, and restore them after it.

    A block that draws without the generator then repeats with it. If the block draws nothing from it, the generator
    moves on, so that the next block draws other numbers. Nothing happens without a generator.
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


def drawn_so_far(device: torch.device) -> bytes:
    """Return the state of PyTorch's default generator of a device. It is on the CPU, so nothing waits for a GPU."""
    state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
    return state.numpy().tobytes()
