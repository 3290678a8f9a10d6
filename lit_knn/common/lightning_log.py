"""Hides Lightning's messages for a while."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def lightning_messages(least: int) -> Iterator[None]:
    """Show Lightning's messages inside the block only from the level `least` of `logging`, such as `logging.ERROR`."""
    logger = logging.getLogger("pytorch_lightning")
    level = logger.level
    logger.setLevel(least)
    try:
        yield
    finally:
        logger.setLevel(level)
