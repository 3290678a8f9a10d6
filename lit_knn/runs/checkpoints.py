"""Writes checkpoints of a training so that no damaged file is left, and checks checkpoints before they are used."""

from pathlib import Path

import torch
from lightning_fabric.plugins.io.torch_io import TorchCheckpointIO

from lit_knn.common.checkpoint_file import Content, not_finite, read_checkpoint_file
from lit_knn.common.errors import InputError, causes, first_line
from lit_knn.common.files import remove_partial, written_whole
from lit_knn.runs.states import Owners, explained, unreadable, without

# Every command needs these parts of a checkpoint, and a `fit` needs the others, too. Lightning writes all of them.
NEEDED = ("state_dict", "global_step", "pytorch-lightning_version")
NEEDED_BY_FIT = ("optimizer_states", "lr_schedulers", "loops")
# Under this key, `lit-knn average` describes the average in a checkpoint that it makes.
AVERAGE_KEY = "power_average"


class WholeCheckpointIO(TorchCheckpointIO):
    """Writes and reads Lightning's checkpoints: replaces a file only when the new one is complete on the disk.

    Lightning's own class does not wait for the disk, so it can leave a file that is cut short, which
    fails only when it is read.
    """

    # The path and the content of a checkpoint that was read already.
    _already_read: tuple[str, Content] | None = None
    # The names of the classes that keep states in the checkpoints, see `owners_of`.
    owners: Owners | None = None

    def keep(self, path: str | Path, checkpoint: Content) -> None:
        """Keep a checkpoint that was read and checked until Lightning loads it, so that it is read only once."""
        self._already_read = str(path), checkpoint

    def __getstate__(self) -> dict[str, object]:
        """Return nothing to copy into a spawned process, which reads the checkpoint itself."""
        return {}

    def save_checkpoint(
        self, checkpoint: Content, path: str | Path, storage_options: object = None
    ) -> None:
        """Write a checkpoint beside its target, then rename it.

        Raises:
            InputError: the file cannot be written; an old one stays as it was. Or no command could read
                a state in it; the checkpoint is then written without this state, to keep the run's work.
        """
        path = Path(path)
        problems = unreadable(checkpoint)
        if not problems:
            _write(checkpoint, path)
            return

        # The run's other work is saved before the error ends it.
        problem = explained(problems, self.owners or {})
        reduced = without(checkpoint, problems)
        if reduced is None:
            raise InputError(f"{problem}; {path} is not written")
        _write(reduced, path)
        raise InputError(f"{problem}; {path} is saved without this")

    def load_checkpoint(
        self, path: str | Path, map_location: object = None, weights_only: bool | None = None
    ) -> Content:
        """Return the kept checkpoint, or read one onto the CPU without running code of it."""
        already_read = self._already_read
        self._already_read = None
        if already_read is not None and already_read[0] == str(path):
            return already_read[1]
        return read_checkpoint_file(path)


def _write(checkpoint: Content, path: Path) -> None:
    """Write a checkpoint whose values can all be read again."""
    try:
        # A run that was killed may have left a partial file. No other process uses it: only the first rank writes.
        remove_partial(path)
        with written_whole(path) as partial:
            with partial.open("wb") as file:
                torch.save(checkpoint, file)
            # Called for the error that it raises if the new file cannot be read: the old one then stays.
            read_checkpoint_file(partial, mmap=True)
    except (OSError, RuntimeError) as error:
        # If writing fails, PyTorch raises a RuntimeError while it handles the OSError, which has the reason.
        reason = next((cause for cause in causes(error) if isinstance(cause, OSError)), None)
        if reason is None:
            raise

        problem = f"{path} cannot be written: {first_line(reason)}"
        if path.is_file():
            problem += "; the one from before is kept"
        raise InputError(problem) from error


def read_training(path: str | Path, to_resume: bool = False) -> Content:
    """Return the content of a training's checkpoint after checking it; the tensors are mapped, not copied.

    Args:
        path: path of the file.
        to_resume: also check what a `fit` needs to resume from it.

    Raises:
        InputError: the file is damaged, lacks a part, or has a weight that is not finite.
    """
    checkpoint = read_checkpoint_file(path, mmap=True)
    if to_resume and AVERAGE_KEY in checkpoint:
        problem = "it is an average that was made after a training"
        raise InputError(f"{path} cannot be resumed from: {problem}")

    missing = [name for name in NEEDED if name not in checkpoint]
    use = "be used" if missing or not to_resume else "be resumed from"
    if to_resume:
        missing += [name for name in NEEDED_BY_FIT if name not in checkpoint]
    if missing:
        parts = " and no ".join(missing)
        raise InputError(f"{path} cannot {use}: the checkpoint has no {parts}")

    bad = not_finite(checkpoint["state_dict"])
    if bad is not None:
        raise InputError(f"{path} has weights that are not finite: {bad}")
    return checkpoint
