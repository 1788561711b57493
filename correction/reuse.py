"""How far a batch may still be trusted, as a factor on the learning rate (VCPO, arXiv 2602.17616).

The variance of an importance-weighted gradient grows as 1 / ESS. A batch in which few weights
count is a small batch, and gets the learning rate of a small batch.
"""

from __future__ import annotations

import math

from correction.checks import require_argument

ROUNDING = 1e-6
"""An effective share may end this far above 1 by rounding of the sums that it is made of."""


def ess_learning_rate_factor(ess_ratio: float, *, base_ratio: float, power: float) -> float:
    """Factor on the learning rate, in [0, 1]: min(1, ess_ratio / base_ratio) ** power.

    ess_ratio: effective sample size over the number of trajectories, in [0, 1], of *unbounded*
    weights: a bound makes every batch look healthy. base_ratio: in (0, 1], that of a batch at
    which the full rate is right. power: above 0; 0.5 is VCPO's square-root rule, 1 its linear one.
    Raises InputError otherwise.
    """
    share = 0 <= ess_ratio <= 1 + ROUNDING
    require_argument(share, "ess_ratio", "a number in [0, 1]", ess_ratio)
    require_argument(0 < base_ratio <= 1, "base_ratio", "a number in (0, 1]", base_ratio)
    require_argument(0 < power < math.inf, "power", "a finite number above 0", power)
    return math.pow(min(1.0, ess_ratio / base_ratio), power)
