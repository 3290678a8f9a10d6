"""Small image files to read, and the error messages for bad files."""

import io
import json
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lit_knn.common.errors import InputError

RNG = np.random.default_rng(0)


def pixels(*shape: int) -> np.ndarray:
    return RNG.integers(0, 256, shape, dtype=np.uint8)


def encoded(array: np.ndarray, kind: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, kind, **options)
    return buffer.getvalue()


def write_folder(path: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    return path


def image_folder(path: Path, number: int = 20, size: tuple[int, int] = (6, 5)) -> Path:
    """Write pictures of random pixels, 0000.png and so on, with labels 0 to 3 in their order."""
    files = {f"{i:04d}.png": encoded(pixels(*size, 3)) for i in range(number)}
    return write_folder(
        path, files | labels_json([[name, i * 4 // number] for i, name in enumerate(files)])
    )


def write_zip(path: Path, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def both(folder: Path, files: dict[str, bytes]) -> list[Path]:
    """Write files as a folder and as a zip."""
    return [write_folder(folder / "folder", files), write_zip(folder / "images.zip", files)]


def labels_json(labels) -> dict[str, bytes]:
    return {"dataset.json": json.dumps({"labels": labels}).encode()}


def refusal(call, *args, **options) -> str:
    with pytest.raises(InputError) as caught:
        call(*args, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def write_cifar10(folder: Path, monkeypatch) -> np.ndarray:
    """Five small batches in the format of CIFAR-10; checksums are not checked."""
    from torchvision.datasets import CIFAR10 as TorchvisionCIFAR10

    monkeypatch.setattr(
        TorchvisionCIFAR10, "_check_integrity", lambda self: (folder / self.base_folder).exists()
    )
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *_: True)
    rows = np.random.default_rng(0).integers(0, 256, (5, 2, 3072), dtype=np.uint8)
    base = folder / TorchvisionCIFAR10.base_folder
    base.mkdir()
    for i in range(5):
        (base / f"data_batch_{i + 1}").write_bytes(
            pickle.dumps({"data": rows[i], "labels": [i, 9 - i]})
        )
    (base / "batches.meta").write_bytes(pickle.dumps({"label_names": list("abcdefghij")}))
    return rows.reshape(10, 3, 32, 32)
