"""The group filter where groups are made: one that is dropped travels as its account.

Pure. The rule itself is `correction.group_filter.keep_group`; what the drop means for the ledger,
the lag bound and the run is the queue's business (cluster/trajectory_queue/). The decision stands
here because here the rewards appear: a filtered group then weighs 7 kB on its way (the schema),
whatever it holds.
"""

from __future__ import annotations

from dataclasses import replace

from actors.trajectory.account import GroupAccount, GroupCosts
from actors.trajectory.record import TrajectoryGroup
from correction.group_filter import GroupFilter, group_outcome, keep_group

FEWEST_JUDGED = 2
"""Survivors that it takes to tell rewards apart; smaller groups are dropped for their size."""
_LARGEST_REWARD = 1e200
"""Rewards beyond are counted as this in an account, so that no sum of them overflows."""


def filtered(group: TrajectoryGroup, rule: GroupFilter) -> TrajectoryGroup:
    """The group as it travels: whole where the rule keeps it, else its account without survivors.

    Raises InputError for a reward that is not finite, which no finished trajectory has.
    """
    rewards = [trajectory.reward for trajectory in group.trajectories]
    if len(rewards) < FEWEST_JUDGED or keep_group(rewards, rule):
        return group
    return replace(group, trajectories=(), filtered=account_of(group))


def account_of(group: TrajectoryGroup) -> GroupAccount:
    """What the survivors of a group cost and how they came out. Raises InputError without any."""
    members = group.trajectories
    return GroupAccount(
        group_outcome([member.reward for member in members]),
        GroupCosts(
            groups=1,
            trajectories=len(members),
            truncated=sum(member.truncated for member in members),
            tokens=group.action_tokens,
            reward_sum=float(sum(_bounded(member.reward) for member in members)),
            generation_s=float(sum(member.generation_s for member in members)),
            environment_s=float(sum(member.environment_s for member in members)),
        ),
    )


def _bounded(reward: float) -> float:
    return max(-_LARGEST_REWARD, min(_LARGEST_REWARD, reward))
