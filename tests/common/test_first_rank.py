"""All ranks get the values and the errors of the first rank."""

import pytest
import torch

from lit_knn.common.distributed import Exchange, on_first_rank
from lit_knn.common.errors import InputError


@pytest.mark.parametrize("error", [InputError("told"), OSError("told")])
def test_an_error_of_the_first_rank_is_one_of_input_everywhere(error):
    def fail():
        raise error

    # An error of another type would leave the other ranks waiting for the result.
    with pytest.raises(InputError, match=r"^told$"):
        on_first_rank(fail)


def test_values_of_the_first_rank_are_those_of_rank_0():
    given, values = [], [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])]

    class OfTwo(Exchange):
        """Delivers what the ranks have sent so far; after the last rank, this is everything."""

        def all_gather(self, rows):
            given.append(rows)
            return given

    exchange = OfTwo()
    for rank in range(2):
        exchange.rank, exchange.size = rank, 2
        received = exchange.of_first(values[rank])
    assert torch.equal(received, values[0])
