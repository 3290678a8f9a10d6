"""Short hashes of what a result depends on: estimators, networks and data."""

import hashlib
import json
from typing import Any

import torch
from torch import Tensor, nn

from lit_knn.estimators import Estimator
from lit_knn.reference import ReferenceSet

DIGITS = 12


def fingerprint(settings: Any) -> str:
    """12 hexadecimal digits of anything that JSON can write."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:DIGITS]


def describe(thing: Any) -> dict[str, Any]:
    """Class and public attributes of an estimator or an index: numbers and names as they are, weights as a hash.

    Of a bound estimator these are the numbers in effect, where the reference set has taken down a default.
    """
    public = {name: getattr(thing, name) for name in vars(thing) if not name.startswith("_")}
    return {"class": type(thing).__name__, **{name: _describe_value(value) for name, value in public.items()}}


def describe_reference(reference: ReferenceSet) -> dict[str, Any]:
    """Images, flips and index of a reference set."""
    return {"images": reference.fingerprint(), "index": describe(reference.index)}


def _describe_value(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Estimator):
        return describe(value)
    if isinstance(value, nn.Module):
        numbers = {name: n for name, n in vars(value).items() if isinstance(n, (int, float)) and name != "training"}
        sha = hashlib.sha256(json.dumps([str(value), numbers], sort_keys=True).encode())
        for name, tensor in value.state_dict().items():
            sha.update(name.encode())
            sha.update(_bytes(tensor))
        return sha.hexdigest()
    if isinstance(value, Tensor):
        return hashlib.sha256(_bytes(value)).hexdigest()
    # May differ in every process: then results are computed again rather than taken for those of something else.
    return repr(value)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
