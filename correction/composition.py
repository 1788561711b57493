"""A policy update as a composition of parts. A Recipe that exists is a right one.

Combinations that count a ratio twice, correct nothing or weigh trajectories by accident are
refused when the Recipe is made (`combination_rules`), with the reason and the way out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

from correction.aggregation import Aggregation
from correction.combination_rules import check_combination
from correction.group_filter import GroupFilter
from correction.learner_parts import NoControl, NoCritic
from correction.needs import Need
from correction.parts import (
    PARTS,
    SEVERAL,
    Advantage,
    Control,
    Critic,
    Part,
    Weight,
)
from correction.penalty_parts import Kl, KlPlace, Penalty
from correction.proximal import Proximal
from correction.shaping_parts import Shaping
from correction.surrogate_parts import PolicySurrogate, ScoreCentered
from correction.token_advantage_parts import VTrace
from correction.trust_parts import TrustMask
from correction.weight_parts import NoWeight, ProximalBehaviourWeight

P = TypeVar("P")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A policy update, composed.

    shaping -> advantage -> proximal -> weight and trust -> surrogate -> penalties -> aggregation,
    with the critic's loss beside them, the learning rate under control, and the groups that are
    worth a step chosen before any of it. allow_no_correction: the user accepts lagged data without
    any correction.
    """

    name: str
    advantage: Advantage
    surrogate: PolicySurrogate
    aggregation: Aggregation
    proximal: Proximal = Proximal.BEHAVIOUR
    weight: Weight = field(default_factory=NoWeight)
    trust: tuple[TrustMask, ...] = ()
    penalties: tuple[Penalty, ...] = ()
    shaping: tuple[Shaping, ...] = ()
    critic: Critic = field(default_factory=NoCritic)
    control: Control = field(default_factory=NoControl)
    group_filter: GroupFilter = GroupFilter.NONE
    allow_no_correction: bool = False

    def __post_init__(self) -> None:
        check_combination(self)

    @property
    def parts(self) -> dict[str, Part | tuple[Part, ...]]:
        """What stands in every slot, in the order of `parts`."""
        return {slot: getattr(self, slot) for slot in (*PARTS, *SEVERAL)}

    @property
    def standing(self) -> tuple[tuple[str, Part], ...]:
        """Every part with its slot."""
        return tuple(
            (slot, part)
            for slot, held in self.parts.items()
            for part in (held if isinstance(held, tuple) else (held,))
        )

    @property
    def experimental(self) -> str:
        """Why the method is not to be relied on; empty if it is."""
        return self.advantage.experimental or self.surrogate.experimental

    @property
    def needs(self) -> frozenset[Need]:
        """What the parts cannot do without, all together."""
        needs = set(self.advantage.needs | self.surrogate.needs)
        for penalty in self.penalties:
            needs |= penalty.needs
        if any(mask.whole_batch for mask in self.trust) or self._rewards_need_scores:
            needs.add(Need.SCORES)
        return frozenset(needs)

    @property
    def needs_proximal_pass(self) -> bool:
        """Whether logprobs of before the first optimiser step on the batch are needed.

        A learner keeps them from its first pass, unless `Need.SCORES` makes it score beforehand.
        """
        return self.proximal is Proximal.RECOMPUTE and self.looks_at_proximal

    @property
    def looks_at_proximal(self) -> bool:
        """Whether any part holds a ratio to or from the proximal policy."""
        return self.surrogate.has_ratio or self.weight.kind == ProximalBehaviourWeight.kind

    @property
    def corrects_lag(self) -> bool:
        """Whether a ratio with mu as its denominator acts anywhere in the loss."""
        ratio_to_mu = self.proximal is Proximal.BEHAVIOUR and self.surrogate.has_ratio
        inside = self.surrogate.own_weight and not self._is_unweighted_centering
        weighted = not isinstance(self.weight, NoWeight)
        return ratio_to_mu or inside or weighted or isinstance(self.advantage, VTrace)

    @property
    def is_imitation(self) -> bool:
        """Whether the tokens are an expert's: nothing of mu matters, so lag does not either."""
        return not self.surrogate.uses_advantages

    @property
    def head_tokens(self) -> int:
        """How many of the engine's likeliest tokens are needed at each place; 0 for none."""
        return self.surrogate.head_tokens

    @property
    def kl(self) -> Kl | None:
        """The penalty towards the reference, if there is one."""
        return self.penalty_of(Kl)

    def penalty_of(self, kind: type[P]) -> P | None:
        """The penalty of a kind, if there is one."""
        return next((part for part in self.penalties if isinstance(part, kind)), None)

    @property
    def _rewards_need_scores(self) -> bool:
        """Whether the reward holds the KL of a policy that is not mu."""
        kl = self.kl
        in_reward = kl is not None and kl.place is KlPlace.REWARD
        return in_reward and self.proximal is Proximal.RECOMPUTE

    @property
    def _is_unweighted_centering(self) -> bool:
        return isinstance(self.surrogate, ScoreCentered) and self.surrogate.weight == "none"
