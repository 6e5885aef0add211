"""The one error of the plan: a choice that the machine or the model does not allow."""

from cheetah.errors import CheetahError
from cheetah.printable import shown


class PlanError(CheetahError):
    """A static decision that cannot hold; the message names the place, the numbers and what to write instead."""


def require_positive(place: str, **values: int) -> None:
    """Refuse any of `values` that is not an int of at least 1."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise PlanError(f"{place}: {name} is {shown(value)}: give a whole number of at least 1")
