"""The network with which a tuning starts."""

from os import PathLike, fspath

from torch import nn

from lit_knn.common.errors import InputError
from lit_knn.modules.consistency_module import check_not_augmented
from lit_knn.sampling.loading import load_network_to_tune


def started_network(
    start: str | PathLike[str] | None,
    net: nn.Module | None,
    sigma_data: float,
    consistency: bool = False,
) -> nn.Module:
    """Return `net` with the weights of `start`, or the architecture that this file stores; see `LitECT`.

    Args:
        start: the file of the trained network; None leaves the weights of `net` as they are.
        net: the architecture; None only with a start.
        sigma_data: standard deviation of the data, which must be that of the start.
        consistency: accept also a consistency model as start.
    """
    check_not_augmented(net)
    if start is None:
        if net is None:
            raise InputError("net=null needs start, the file of a trained network")
        return net

    try:
        raw_net, trained_sigma_data = load_network_to_tune(start, net, consistency)
    except InputError as error:
        raise InputError(f"start={error}") from error

    if trained_sigma_data != sigma_data:
        problem = f"start={fspath(start)} was trained with sigma_data={trained_sigma_data}"
        raise InputError(f"{problem}, not {sigma_data}")
    return raw_net
