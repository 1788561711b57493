"""V-trace beside Ray RLlib's, which comes with Ray and is always compared, and torchrl's."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from correction.ratios import Level
from correction.steps import StepUnit
from correction.vtrace import VtraceEstimate, vtrace
from tests.numerics.peers.comparison import Comparison, compared
from tests.numerics.peers.peer_batches import PeerBatch, batches
from tests.numerics.peers.peer_episodes import Episodes, episodes_of
from tests.numerics.peers.peer_source import FOLDER, load, needs, ray_file

BARS = [(1.0, 1.0), (1.5, 1.2), (4.0, 2.0)]
"""rho_bar and pg_rho_bar; c_bar is 1, as RLlib has it."""
GAMMA = 31 / 32
"""A number that float32 holds exactly: torchrl rounds its discounts to float32."""


@cache
def rllib() -> SimpleNamespace:
    return load(
        ray_file("rllib/algorithms/impala/torch/vtrace_torch_v2.py"),
        {"vtrace_torch"},
    )


@cache
def torchrl() -> SimpleNamespace:
    names = {"vtrace_advantage_estimate", "SHAPE_ERR"}
    return load(FOLDER / "torchrl/objectives/value/functional.py", names)


def ours(batch: PeerBatch, episodes: Episodes, **settings: Any) -> VtraceEstimate:  # noqa: ANN401
    settings = {"unit": StepUnit.TOKEN, "gamma": GAMMA, **settings}
    return vtrace(
        batch.target - batch.behaviour,
        batch.token_rewards,
        batch.values,
        episodes.bootstrap,
        batch.mask,
        batch.turns,
        **settings,
    )


def rllibs(episodes: Episodes, rho_bar: float, pg_rho_bar: float) -> tuple[Tensor, Tensor]:
    """Targets and advantages [B, S]. RLlib's rows are of one length, [T, B]: behind a row's end
    value and reward are the bootstrap value and nothing follows, so that the target is it too."""
    after = ~episodes.real
    bootstrap = episodes.bootstrap[:, None].expand(after.shape)
    targets, advantages = rllib().vtrace_torch(
        target_action_log_probs=episodes.log_ratios.t(),
        behaviour_action_log_probs=torch.zeros_like(episodes.log_ratios.t()),
        discounts=(GAMMA * episodes.real.to(episodes.values.dtype)).t(),
        rewards=torch.where(after, bootstrap, episodes.rewards).t(),
        values=torch.where(after, bootstrap, episodes.values).t(),
        bootstrap_values=episodes.bootstrap,
        clip_rho_threshold=rho_bar,
        clip_pg_rho_threshold=pg_rho_bar,
    )
    return targets.t(), advantages.t()


def torchrls(
    episodes: Episodes, rho_bar: float, c_bar: float, gamma: float = GAMMA
) -> tuple[Tensor, Tensor]:
    """Targets and advantages [B, S]; what is behind a row's end is another episode to it."""
    shape = (*episodes.real.shape, 1)
    done = episodes.last | ~episodes.real
    advantages, targets = torchrl().vtrace_advantage_estimate(
        gamma,
        episodes.log_ratios.view(shape),
        torch.zeros(shape, dtype=episodes.values.dtype),
        episodes.values.view(shape),
        episodes.next_values.view(shape),
        episodes.rewards.view(shape),
        done.view(shape),
        (done & ~episodes.cut[:, None]).view(shape),
        rho_bar,
        c_bar,
    )
    return targets[..., 0], advantages[..., 0]


def see(
    seen: Comparison,
    episodes: Episodes,
    found: VtraceEstimate,
    theirs: tuple[Tensor, Tensor],
) -> None:
    seen.same(episodes.of(found.value_targets), theirs[0][episodes.real])
    seen.same(episodes.of(found.advantages), theirs[1][episodes.real])


@pytest.mark.parametrize(("rho_bar", "pg_rho_bar"), BARS)
def test_token_level_is_rllibs(rho_bar: float, pg_rho_bar: float) -> None:
    with compared(f"vtrace token, rho {rho_bar:g} pg {pg_rho_bar:g}", "Ray RLlib") as seen:
        for batch in batches():
            episodes = episodes_of(batch, StepUnit.TOKEN)
            found = ours(batch, episodes, rho_bar=rho_bar, pg_rho_bar=pg_rho_bar)
            seen.batch(batch.seed)
            see(seen, episodes, found, rllibs(episodes, rho_bar, pg_rho_bar))


@pytest.mark.parametrize("level", [Level.TURN_PRODUCT, Level.TURN_GEOMETRIC])
def test_turn_level_is_rllibs_over_turns(level: Level) -> None:
    with compared(f"vtrace {level}", "Ray RLlib, turns as steps") as seen:
        for batch in batches(1000):
            episodes = episodes_of(batch, StepUnit.TURN, mean=level is Level.TURN_GEOMETRIC)
            found = ours(batch, episodes, unit=StepUnit.TURN, turn_level=level)
            seen.batch(batch.seed)
            see(seen, episodes, found, rllibs(episodes, 1.0, 1.0))


@needs["torchrl"]
@pytest.mark.parametrize(("rho_bar", "c_bar"), [(1.0, 1.0), (2.0, 1.5), (1.0, 0.5)])
def test_token_level_is_torchrls(rho_bar: float, c_bar: float) -> None:
    """One bound for target and advantage; ends and cuts lie inside of the tensor."""
    with compared(f"vtrace token, rho {rho_bar:g} c {c_bar:g}", "torchrl") as seen:
        for batch in batches():
            episodes = episodes_of(batch, StepUnit.TOKEN)
            bars = {"rho_bar": rho_bar, "c_bar": c_bar, "pg_rho_bar": rho_bar}
            found = ours(batch, episodes, **bars)
            seen.batch(batch.seed)
            see(seen, episodes, found, torchrls(episodes, rho_bar, c_bar))


@needs["torchrl"]
def test_torchrl_departs_in_the_dtype_of_its_discounts() -> None:
    why = "gamma is rounded to float32, whatever the dtype"
    rounded = float(torch.tensor(0.97, dtype=torch.float32))
    with compared("vtrace token, gamma 0.97", "torchrl", why) as seen:
        for batch in batches(300):
            episodes = episodes_of(batch, StepUnit.TOKEN)
            exact, explained = (ours(batch, episodes, gamma=gamma) for gamma in (0.97, rounded))
            targets, advantages = torchrls(episodes, 1.0, 1.0, gamma=0.97)
            seen.batch(batch.seed)
            for name, theirs in (("value_targets", targets), ("advantages", advantages)):
                seen.departs_as(
                    episodes.of(getattr(exact, name)),
                    theirs[episodes.real],
                    episodes.of(getattr(explained, name)),
                )
