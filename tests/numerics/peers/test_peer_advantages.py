"""Advantages of whole trajectories beside verl."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from correction.advantages import dr_grpo_advantages, grpo_advantages, rloo_advantages
from correction.errors import InputError
from tests.numerics.peers import verl_functions as verl
from tests.numerics.peers.comparison import compared
from tests.numerics.peers.peer_batches import PeerBatch, batches
from tests.numerics.peers.peer_source import needs

pytestmark = needs["verl"]
EPSILON = 1e-6


def verls(batch: PeerBatch, name: str, **settings: object) -> Tensor:
    """verl's advantages, one a trajectory: [B]. It wants the rewards at tokens and a mask."""
    function = getattr(verl.core(), f"compute_{name}_outcome_advantage")
    at_tokens = torch.nn.functional.pad(batch.rewards[:, None], (0, 2))
    every = torch.ones_like(at_tokens)
    advantages, _ = function(at_tokens, every, batch.group_index.numpy(), **settings)
    assert isinstance(advantages, Tensor)
    return advantages[:, 0]


def is_degenerate(batch: PeerBatch) -> Tensor:
    """Whether all rewards of the trajectory's group are equal: [B] bool."""
    siblings = batch.group_index[:, None] == batch.group_index
    return ((batch.rewards[:, None] == batch.rewards) | ~siblings).all(dim=1)


def deviation(batch: PeerBatch, ddof: int) -> Tensor:
    """Standard deviation of the trajectory's group: [B]."""
    groups = [batch.rewards[batch.group_index == group] for group in batch.group_index]
    return torch.stack([group.std(correction=ddof) for group in groups])


def test_grpo_with_the_unbiased_deviation_is_verls() -> None:
    with compared("grpo, std_ddof 1", "verl grpo") as seen:
        for batch in batches():
            seen.batch(batch.seed)
            ours = grpo_advantages(batch.rewards, batch.group_index, std_ddof=1)
            spread = ~is_degenerate(batch)
            seen.same(ours[spread], verls(batch, "grpo")[spread])


def test_grpo_departs_in_its_deviation() -> None:
    with compared("grpo, std_ddof 0", "verl grpo", "divides by G - 1 in the variance") as seen:
        for batch in batches(500):
            seen.batch(batch.seed)
            spread = ~is_degenerate(batch)
            ours = grpo_advantages(batch.rewards, batch.group_index)
            population, unbiased = deviation(batch, 0), deviation(batch, 1)
            explained = ours * (population + EPSILON) / (unbiased + EPSILON)
            seen.departs_as(ours[spread], verls(batch, "grpo")[spread], explained[spread])


def test_grpo_departs_in_degenerate_groups() -> None:
    """In float32 the mean of three times 0.1 is not 0.1, and its error is divided by epsilon."""
    why = "equal rewards: rounding of the mean / 1e-6; ours is exactly 0"
    with compared("grpo, degenerate group", "verl grpo", why) as seen:
        for batch in batches(dtype=torch.float32):
            rewards, equal = batch.rewards, is_degenerate(batch)
            ours = grpo_advantages(rewards, batch.group_index, std_ddof=1)[equal]
            groups = [rewards[batch.group_index == group] for group in batch.group_index]
            rounding = rewards - torch.stack([group.mean() for group in groups])
            explained = rounding / (deviation(batch, 1) + EPSILON)
            seen.batch(batch.seed)
            assert bool((ours == 0).all())
            seen.departs_as(ours, verls(batch, "grpo")[equal], explained[equal])


def test_dr_grpo_is_verls() -> None:
    with compared("dr_grpo", "verl grpo, no std") as seen:
        for batch in batches():
            seen.batch(batch.seed)
            ours = dr_grpo_advantages(batch.rewards, batch.group_index)
            seen.same(ours, verls(batch, "grpo", norm_adv_by_std_in_grpo=False))


@pytest.mark.parametrize("name", ["rloo", "rloo_vectorized"])
def test_rloo_is_verls(name: str) -> None:
    with compared("rloo", f"verl {name}") as seen:
        for batch in batches():
            seen.batch(batch.seed)
            ours = rloo_advantages(batch.rewards, batch.group_index)
            seen.same(ours, verls(batch, name))


@pytest.mark.parametrize(
    ("name", "estimator"), [("grpo", grpo_advantages), ("rloo", rloo_advantages)]
)
def test_a_group_of_one_is_refused_where_verl_takes_the_reward(
    name: str, estimator: object
) -> None:
    rewards, index = torch.tensor([0.7, 0.1, 0.3]), torch.tensor([0, 1, 1])
    assert callable(estimator)
    with pytest.raises(InputError, match="group 0 has one member"):
        estimator(rewards, index)
    function = getattr(verl.core(), f"compute_{name}_outcome_advantage")
    theirs, _ = function(rewards[:, None], torch.ones(3, 1), index.numpy())
    torch.testing.assert_close(theirs[0, 0], rewards[0])
