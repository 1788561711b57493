"""A policy update as a composition of parts. A Recipe that exists is a right one.

Combinations that count a ratio twice, correct nothing or weigh trajectories by accident are
refused when the Recipe is made, with the reason and the way out.
"""

from __future__ import annotations

from dataclasses import dataclass

from correction.aggregation import Aggregation
from correction.errors import RecipeError
from correction.parts import PARTS, Advantage, Part, Surrogate, Weight
from correction.proximal import Proximal
from correction.ratios import Level
from correction.weight_parts import NoWeight, ProximalBehaviourWeight, TargetBehaviourWeight


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A policy update, composed: advantages -> proximal -> weight -> surrogate -> aggregation.

    allow_no_correction: the user accepts lagged data without any correction.
    """

    name: str
    advantage: Advantage
    proximal: Proximal
    weight: Weight
    surrogate: Surrogate
    aggregation: Aggregation
    allow_no_correction: bool = False

    def __post_init__(self) -> None:
        _check_double_counting(self)
        _check_whole_sequence(self)

    @property
    def parts(self) -> dict[str, Part]:
        """The part in every slot."""
        return {slot: getattr(self, slot) for slot in PARTS}

    @property
    def needs_proximal_pass(self) -> bool:
        """Whether logprobs of before the first optimiser step on the batch are needed."""
        if self.proximal is Proximal.BEHAVIOUR:
            return False
        return self.surrogate.has_ratio or self.weight.kind == ProximalBehaviourWeight.kind

    @property
    def corrects_lag(self) -> bool:
        """Whether a ratio with mu as its denominator acts anywhere in the loss."""
        ratio_to_mu = self.proximal is Proximal.BEHAVIOUR and self.surrogate.has_ratio
        return ratio_to_mu or not isinstance(self.weight, NoWeight)


def _check_double_counting(recipe: Recipe) -> None:
    """Each factor of theta/mu = theta/prox x prox/mu may act once."""
    bypass = recipe.proximal is Proximal.BEHAVIOUR
    weighted = not isinstance(recipe.weight, NoWeight)
    if bypass and recipe.surrogate.has_ratio and weighted:
        raise RecipeError(
            f"correction: proximal = behaviour puts theta/mu inside {recipe.surrogate.kind}; a "
            "weight beside it counts the ratio twice. Set weight = none or proximal = recompute"
        )
    if bypass and recipe.weight.kind == ProximalBehaviourWeight.kind:
        raise RecipeError(
            "correction: proximal = behaviour makes prox/mu equal to 1, so this weight corrects "
            "nothing. Set weight = target_behaviour or proximal = recompute"
        )
    if isinstance(recipe.weight, TargetBehaviourWeight) and recipe.surrogate.has_ratio:
        raise RecipeError(
            f"correction: {recipe.surrogate.kind} holds theta/prox; the weight theta/mu counts it "
            "twice. Set weight = proximal_behaviour or surrogate = reinforce"
        )


def _check_whole_sequence(recipe: Recipe) -> None:
    """GSPO decides a trajectory at a time: its loss must count trajectories, not tokens."""
    if not recipe.surrogate.whole_sequence:
        return
    if recipe.aggregation is not Aggregation.SEQUENCE_MEAN_TOKEN_MEAN:
        raise RecipeError(
            f"correction: {recipe.surrogate.kind} has one loss a trajectory, {recipe.aggregation} "
            "would weigh it by length. Set aggregation = sequence_mean_token_mean"
        )
    one_weight = recipe.weight.level in (Level.GEOMETRIC, Level.SEQUENCE_PRODUCT)
    if not isinstance(recipe.weight, NoWeight) and not one_weight:
        raise RecipeError(
            f"correction: {recipe.surrogate.kind} has one ratio a trajectory, the weight is taken "
            f"at level {recipe.weight.level}. Set weight.level = geometric or sequence_product"
        )
