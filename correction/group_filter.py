from enum import StrEnum


class GroupFilter(StrEnum):
    NONE = "none"
    MIXED_REWARDS = "mixed_rewards"
