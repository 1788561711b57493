from __future__ import annotations

from typing import Any

import pytest

from correction.errors import ConfigError
from learner.settings import CriticSettings, PretrainingSettings
from tests.learner.learner_ranks import settings_for


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"kind": "both"}, "critic.kind"),
        ({"kind": "head", "path": "somewhere"}, "critic.path"),
        ({"path": "somewhere"}, "critic.path"),
        ({"kind": "model", "detach_trunk": True}, "critic.detach_trunk"),
        ({"kind": "head", "learning_rate": 0.0}, "critic.learning_rate"),
        ({"kind": "head", "learning_rate": float("nan")}, "critic.learning_rate"),
    ],
)
def test_impossible_critics_are_refused_by_name(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        CriticSettings(**changes)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"path": "corpus.csv"}, "pretraining.path"),
        ({"block_tokens": 1}, "pretraining.block_tokens"),
        ({"tokens_per_step": 0}, "pretraining.tokens_per_step"),
        ({"tokens_per_step": 700}, "pretraining.tokens_per_step"),
    ],
)
def test_impossible_pretraining_is_refused_by_name(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        PretrainingSettings(**{"path": "corpus.jsonl", **changes})


def test_nothing_extra_is_on_by_default() -> None:
    settings = settings_for("anywhere")
    assert settings.critic.kind == "none"
    assert settings.reference is None
    assert settings.pretraining is None
