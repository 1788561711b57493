from __future__ import annotations

from pathlib import Path

import pytest
import torch

from correction.errors import ConfigError
from learner.critic import HeadCritic, ModelCritic, ValueHead, build_critic
from learner.policy_model import load_policy
from learner.settings import CriticSettings, LearnerSettings
from tests.learner.learner_ranks import settings_for, write_tiny_model


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tiny_model(tmp_path_factory.mktemp("policy"))


def settings_with(path: str, critic: CriticSettings) -> LearnerSettings:
    return settings_for(path, critic=critic)


def test_no_critic_is_built_unless_asked_for(path: str) -> None:
    settings = settings_for(path)
    assert build_critic(settings, load_policy(settings)) is None


def test_a_value_head_starts_at_zero_draws_nothing_and_learns_at_once() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    head = ValueHead(4, torch.float32)
    assert torch.equal(torch.get_rng_state(), before)
    hidden = torch.ones(3, 4, requires_grad=True)
    values = head(hidden)
    assert values.tolist() == [0.0, 0.0, 0.0]
    values.sum().backward()
    assert head.weight.grad is not None
    assert head.weight.grad.tolist() == [[3.0] * 4]
    assert hidden.grad is not None
    assert not hidden.grad.any()


def test_values_are_float32_under_bfloat16() -> None:
    head = ValueHead(64, torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        head.weight.copy_(torch.randn(1, 64, generator=generator))
    hidden = torch.randn(5, 64, generator=generator).bfloat16()
    values = head(hidden)
    assert values.dtype == torch.float32
    torch.testing.assert_close(values, (hidden.float() @ head.weight.float()[0]))


def test_a_head_reads_the_policy_and_a_model_has_a_trunk_of_its_own(
    path: str, tmp_path: Path
) -> None:
    policy = load_policy(settings_for(path))
    head = build_critic(settings_with(path, CriticSettings(kind="head")), policy)
    assert isinstance(head, HeadCritic)
    assert [tuple(p.shape) for p in head.parameters()] == [(1, 64), (1,)]
    same = build_critic(settings_with(path, CriticSettings(kind="model")), policy)
    assert isinstance(same, ModelCritic)
    trunk = dict(same.trunk.named_parameters())
    weights = {name.removeprefix("model."): p for name, p in policy.named_parameters()}
    assert trunk.keys() == weights.keys()
    assert all(torch.equal(trunk[name], p) and trunk[name] is not p for name, p in weights.items())
    other_path = write_tiny_model(tmp_path / "other", seed=5)
    other = build_critic(settings_with(path, CriticSettings(kind="model", path=other_path)), policy)
    assert isinstance(other, ModelCritic)
    assert not torch.equal(
        dict(other.trunk.named_parameters())["embed_tokens.weight"], weights["embed_tokens.weight"]
    )


def test_a_critic_without_a_trunk_is_refused(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import Qwen3ForCausalLM

    monkeypatch.setattr(Qwen3ForCausalLM, "base_model_prefix", "")
    settings = settings_with(path, CriticSettings(kind="model"))
    with pytest.raises(ConfigError, match=r"critic\.path: .*no trunk"):
        build_critic(settings, load_policy(settings))
