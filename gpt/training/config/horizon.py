"""How long a run trains, as people write it: `2000steps`, `100Mtokens`, `3epochs`, `90s`, `3min` or `2h`."""

import re
from dataclasses import dataclass

from gpt.errors import UserError

_FACTORS = {None: 1, "k": 10**3, "M": 10**6, "B": 10**9, "s": 1, "min": 60, "h": 3600}
_HORIZON = re.compile(r"(\d+(?:\.\d+)?)\s*(?:(k|M|B)?\s*(step|token)s?|(epoch)s?|(s|min|h))")


@dataclass(frozen=True)
class Horizon:
    """How long a run trains: an amount of `steps`, `tokens`, `epochs` or `seconds`."""

    amount: float
    unit: str


def parse_horizon(text: str) -> Horizon:
    """Read a horizon such as `2000steps`, `100Mtokens`, `3epochs`, `90s`, `3min` or `2h`; else raise `UserError`."""
    match = _HORIZON.fullmatch(text.strip())
    if not match or not 0 < float(match[1]) < 1e15:
        raise UserError(
            f"horizon={text!r} is not a horizon: give auto, or a number above 0 and a unit, such as "
            "2000steps, 100Mtokens, 3epochs, 90s, 3min or 2h"
        )
    amount = float(match[1]) * _FACTORS[match[2] or match[5]]
    return Horizon(amount, f"{match[3] or match[4] or 'second'}s")
