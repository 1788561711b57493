from __future__ import annotations

import math
from collections.abc import Mapping

import pytest

from correction.aggregation import Aggregation
from correction.bounds import Bound
from correction.errors import ConfigError, RecipeError
from correction.needs import Need
from correction.parts import kind_of
from correction.penalty_parts import Kl, KlPlace
from correction.proximal import Proximal
from correction.ratios import Level
from correction.recipes import DEFAULT_RECIPE, RECIPES, Recipe, describe, resolve
from correction.surrogate_parts import Gspo, PpoClip
from correction.token_advantage_parts import VTrace
from correction.trust_parts import SecondMoment, Veto
from correction.weight_parts import NoWeight, ProximalBehaviourWeight


def resolved(
    name: str, overrides: Mapping[str, object] | None = None, lag: int = 4, group: int = 8
) -> Recipe:
    return resolve(name, overrides or {}, max_lag_versions=lag, group_size=group)


def test_the_default_is_decoupled_ppo_with_a_truncated_weight() -> None:
    recipe = resolved(DEFAULT_RECIPE)
    assert recipe.proximal is Proximal.RECOMPUTE
    assert recipe.weight == ProximalBehaviourWeight(Level.TOKEN, Bound.TRUNCATE, high=5.0)
    assert recipe.surrogate == PpoClip(0.2, 0.2, 3.0)
    assert recipe.aggregation is Aggregation.TOKEN_MEAN


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_stands_under_its_name_and_describes_every_slot(name: str) -> None:
    recipe = resolved(name, {"allow_no_correction": True})
    assert recipe.name == name
    text = describe(recipe)
    told = [line.split()[0] for line in text.splitlines()]
    assert told[0] == "recipe"
    for slot, part in recipe.standing:
        assert (kind_of(part) == "none" and slot != "weight") or slot in told
    assert told[-1] == ("experimental" if recipe.experimental else "corrects")


def test_describe_shows_the_parameters_that_have_an_effect() -> None:
    text = describe(resolved("decoupled_ppo", {"weight.high": 5, "surrogate.clip_high": 0.28}))
    assert "proximal_behaviour (level=token, bound=truncate, high=5.0)" in text
    assert "ppo_clip (clip_low=0.2, clip_high=0.28, dual_clip=3.0)" in text
    assert "corrects lag  yes" in text


def test_nested_tables_and_dotted_keys_mean_the_same() -> None:
    dotted = {
        "surrogate": "gspo",
        "surrogate.clip_low": 0.1,
        "aggregation": "sequence_mean_token_mean",
        "weight.level": "geometric",
    }
    nested = {
        "surrogate": {"kind": "gspo", "clip_low": 0.1},
        "aggregation": "sequence_mean_token_mean",
        "weight": {"level": "geometric"},
    }
    assert resolved("decoupled_ppo", dotted) == resolved("decoupled_ppo", nested)
    assert resolved("decoupled_ppo", nested).surrogate == Gspo(clip_low=0.1)


def test_parameters_of_one_part_are_judged_together_in_any_order() -> None:
    wide = {"surrogate.clip_high": 4.0, "surrogate.dual_clip": 6.0}
    assert resolved("ppo_bypass", wide) == resolved("ppo_bypass", dict(reversed(wide.items())))


def test_a_named_part_starts_from_its_own_defaults() -> None:
    recipe = resolved("decoupled_gspo", {"weight": "none"}, lag=0)
    assert recipe.weight == NoWeight()
    with pytest.raises(RecipeError, match="level token"):
        resolved("decoupled_gspo", {"weight": "proximal_behaviour"})


@pytest.mark.parametrize(
    ("name", "needed"),
    [
        ("decoupled_ppo", True),
        ("ppo_bypass", False),
        ("gspo", False),
        ("decoupled_gspo", True),
        ("a3po", False),
        ("none", False),
    ],
)
def test_a_scoring_pass_is_asked_for_only_where_it_is_used(name: str, needed: bool) -> None:
    assert resolved(name, {"allow_no_correction": True}).needs_proximal_pass is needed


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("grppo", {}, "unknown 'grppo'; there are decoupled_ppo, "),
        ("gspo", {"surogate": "gspo"}, "unknown override 'surogate'; there are advantage, "),
        ("gspo", {"surogate.clip_low": 1}, "unknown override 'surogate.clip_low'"),
        ("gspo", {"surrogate": "ppo"}, "correction.surrogate: unknown 'ppo'; there are ppo_clip"),
        ("gspo", {"surrogate": 3}, "correction.surrogate: unknown 3"),
        ("gspo", {"surrogate.dual_clip": 3.0}, "'gspo' has no such parameter; it has clip_high"),
        ("gspo", {"aggregation.length": 3}, "'sequence_mean_token_mean' has no parameters"),
        ("gspo", {"surrogate.clip_low": "0.2"}, "clip_low: expected float, got '0.2'"),
        ("gspo", {"surrogate.clip_low": True}, "clip_low: expected float, got True"),
        ("gspo", {"advantage.std_ddof": 0.5}, "std_ddof: expected int, got 0.5"),
        ("gspo", {"advantage.std_ddof": 2}, "std_ddof: must be 0 or 1, got 2"),
        ("gspo", {"advantage.std_epsilon": -1}, "std_epsilon: must be in"),
        ("gspo", {"surrogate.clip_low": 1.0}, "clip_low: must be in"),
        ("gspo", {"surrogate.clip_high": 0.0}, "clip_high: must be > 0"),
        ("gspo", {"surrogate.clip_high": float("nan")}, "clip_high: must be finite, got nan"),
        ("ppo_bypass", {"surrogate.dual_clip": 1.1}, "dual_clip: must be 0 .off. or > 1"),
        ("decoupled_ppo", {"weight.high": 0.5}, "weight.high: must be >= 1"),
        ("decoupled_ppo", {"weight.bound": "band", "weight.low": 1.5}, "weight.low: must be in"),
        ("decoupled_ppo", {"weight.bound": "trunc"}, "unknown 'trunc'; there are none, truncate"),
        ("decoupled_ppo", {"weight.low": 0.1}, "weight.low: has no effect beside level=token, b"),
        ("decoupled_ppo", {"weight.bound": "none", "weight.high": 3}, "weight.high: has no effect"),
        ("none", {"allow_no_correction": 1}, "allow_no_correction: not true or false: 1"),
        ("gspo", {"trust": "vetto"}, "correction.trust: unknown 'vetto'; there are max_lag, "),
        ("gspo", {"trust": ["veto", "veto"]}, "a kind stands in"),
        ("gspo", {"trust.veto": 0.1}, "trust.veto: name a kind and a parameter"),
        ("gspo", {"trust.veto.high": 0.1}, "'veto' has no such parameter; it has low"),
        ("gspo", {"trust.veto.low": 2.0}, "trust.veto.low: must be in"),
        ("gspo", {"penalties.kl.estimator": "k4"}, "unknown 'k4'; there are k1, k2, k3"),
        ("gspo", {"penalties.kl.horizon": 5.0}, "kl.horizon: has no effect beside"),
        (
            "vtrace",
            {"advantage.unit": "token", "advantage.turn_level": "turn_product"},
            "turn_level: has no effect",
        ),
        ("vtrace", {"advantage.turn_level": "geometric"}, "turn_product or turn_geometric"),
        ("vtrace", {"advantage.rho_bar": 0.5}, "rho_bar: must be >= c_bar"),
        ("ppo", {"advantage.bootstrap_truncated": 1}, "expected bool, got 1"),
        ("grpo", {"penalties.kl.coefficient": float("inf")}, "coefficient: must be finite, got"),
        ("vcpo", {"control.power": float("inf")}, "control.power: must be finite"),
        (
            "grpo",
            {"penalties.kl.place": "reward", "penalties.kl.estimator": "k2"},
            "kl.estimator: has no effect",
        ),
        (
            "erpo",
            {"penalties.prompt_kl": {"weights": "none", "weight_clip": 3.0}},
            "weight_clip: has no effect",
        ),
        ("aipo", {"proximal": "recompute"}, "correction.proximal: has no effect"),
        ("gepo", {"proximal": "recompute"}, "correction.proximal: has no effect"),
    ],
)
def test_unknown_and_impossible_overrides_are_refused(
    name: str, overrides: dict[str, object], message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        resolved(name, overrides, lag=0)


@pytest.mark.parametrize(
    ("name", "overrides", "reason", "way_out"),
    [
        (
            "ppo_bypass",
            {"weight": "proximal_behaviour"},
            "counts the ratio twice",
            "weight = none or proximal = recompute",
        ),
        ("decoupled_gspo", {"proximal": "behaviour"}, "counts the ratio twice", "weight = none"),
        (
            "none",
            {"proximal": "behaviour", "weight": "proximal_behaviour"},
            "corrects nothing",
            "weight = target_behaviour",
        ),
        ("gepo", {"weight": "target_behaviour"}, "counts the ratio twice", "weight = none"),
        ("gepo", {"aggregation": "constant"}, "weigh it by length", "sequence_mean_token_mean"),
        ("gspo", {"advantage": "teacher"}, "a number a token", "surrogate = ppo_clip"),
        ("vtrace", {"surrogate": "ppo_clip"}, "counts it twice", "surrogate = reinforce"),
        ("vtrace", {"weight": "target_behaviour"}, "counts it twice", "weight = none"),
        ("vtrace", {"advantage.values": "critic"}, "there is no critic", "critic = value"),
        ("ppo", {"critic": "none"}, "there is no critic", "critic = value"),
        ("ppo_bypass", {"critic": "value"}, "trained for nothing", "critic = none"),
        ("impala", {"critic.clip": 0.2}, "values of before the step", "critic.clip = 0"),
        ("dagger", {"trust": "veto"}, "imitates", "trust = []"),
        ("dagger", {"advantage": "grpo"}, "looks at no reward", "advantage = return"),
        ("dagger", {"shaping": "overlong_penalty"}, "looks at no reward", "take it out"),
        ("score_centering", {"weight": "target_behaviour"}, "twice", "weight = none"),
        ("gspo", {"trust": "kpop"}, "rejects single tokens", "unit = trajectory"),
        ("gepo", {"trust": "m2"}, "rejects single tokens", "veto"),
        ("gspo", {"trust.max_lag.max_lag_versions": 1}, "rejects single tokens", "trajectory"),
        (
            "gspo",
            {"trust.max_lag.max_lag_versions": 4, "trust.max_lag.unit": "trajectory"},
            "rejects nothing",
            "Set a smaller one",
        ),
        ("vtrace", {"penalties": "prompt_kl"}, "makes its own", "weights = none"),
        ("maxrl", {"shaping": "overlong_penalty"}, "rewards of 0 and 1", "overlong_filter"),
        ("maxrl", {"penalties.kl.place": "reward"}, "rewards of 0 and 1", "place = loss"),
        ("topr", {"advantage": "reinforce_pp"}, "needs one sign", "weight.level = token"),
        ("vcpo", {"weight.high": 4.0}, "the loss must use the same", "advantage.max_weight"),
        ("ppo_bypass", {"advantage": "opob"}, "the loss must use the same", "sequence_product"),
        (
            "score_centering",
            {"surrogate.weight": "none"},
            "corrects for no lag",
            "allow_no_correction",
        ),
        (
            "decoupled_ppo",
            {"weight": "target_behaviour"},
            "counts it twice",
            "surrogate = reinforce",
        ),
        (
            "gspo",
            {"aggregation": "token_mean"},
            "one loss a trajectory",
            "aggregation = sequence_mean_token_mean",
        ),
        (
            "decoupled_gspo",
            {"weight.level": "token"},
            "one ratio a trajectory",
            "level = geometric",
        ),
        ("reinforce", {}, "corrects for no lag; max_lag is 4", "allow_no_correction"),
        ("none", {}, "corrects for no lag", "max_lag = 0"),
        ("decoupled_ppo", {"weight": "none"}, "corrects for no lag", "a recipe that corrects"),
    ],
)
def test_wrong_combinations_name_the_reason_and_the_way_out(
    name: str, overrides: dict[str, object], reason: str, way_out: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        resolved(name, overrides)
    assert reason in str(caught.value)
    assert way_out in str(caught.value)


@pytest.mark.parametrize("name", ["reinforce", "none"])
def test_no_correction_is_allowed_on_policy_or_when_asked_for(name: str) -> None:
    assert resolved(name, lag=0).corrects_lag is False
    assert resolved(name, {"allow_no_correction": True}).allow_no_correction


def test_slots_of_several_parts_are_replaced_added_to_and_emptied() -> None:
    both = resolved("m2po", {"trust": ["veto", "m2"], "trust.m2.limit": 0.1})
    assert [(rule.kind, rule) for rule in both.trust] == [
        ("veto", Veto()),
        ("m2", SecondMoment(0.1)),
    ]
    added = resolved("m2po", {"trust": {"veto": {"low": 0.01}}})
    assert added.trust == (SecondMoment(), Veto(0.01))
    assert resolved("m2po", {"trust": []}).trust == ()
    assert resolved("m2po", {"trust": {"veto": {}}}).trust == (SecondMoment(), Veto())


def test_naming_kinds_keeps_what_the_recipe_has_of_them() -> None:
    kept = resolved("instructgpt", {"penalties": ["kl"]}).penalties
    assert kept == (Kl(coefficient=0.02, place=KlPlace.REWARD),)


def test_bounds_may_be_infinite_and_masks_of_trajectories_go_with_gspo() -> None:
    bars = {"advantage.rho_bar": math.inf, "advantage.c_bar": math.inf}
    assert resolved("vtrace", bars).advantage == VTrace(rho_bar=math.inf, c_bar=math.inf)
    lag = {"trust.max_lag": {"max_lag_versions": 2, "unit": "trajectory"}}
    assert resolved("gspo", lag | {"trust": "veto"}).trust[0] == Veto()
    both = {"weight.high": 4.0, "advantage.max_weight": 4.0}
    assert resolved("vcpo", both).weight.level is Level.SEQUENCE_PRODUCT


def test_a_part_from_a_secondary_source_is_told_wherever_it_stands() -> None:
    assert "experimental" in describe(resolved("grpo", {"advantage": "reco"}))
    assert "experimental" in describe(resolved("ppo_bypass", {"surrogate": "reco_clip"}))
    assert "experimental" not in describe(resolved("grpo"))


def test_gepo_needs_a_group_whatever_its_advantage() -> None:
    with pytest.raises(RecipeError, match="gepo needs groups of at least 2"):
        resolved("gepo", {"advantage": "return"}, group=1)


def test_needs_follow_from_the_parts() -> None:
    assert resolved("ppo_bypass").needs == set()
    assert resolved("m2po").needs == {Need.SCORES}
    assert resolved("m2po", {"trust": []}).needs == set()
    reward_kl = {"penalties.kl.place": "reward"}
    assert resolved("ppo_bypass", reward_kl).needs == {Need.REFERENCE}
    assert resolved("decoupled_ppo", reward_kl).needs == {Need.REFERENCE, Need.SCORES}
    assert resolved("impala").needs == {Need.VALUES, Need.ENTROPY}
    assert resolved("score_centering", {"surrogate.head": 16}).head_tokens == 16


@pytest.mark.parametrize("advantage", ["rloo", "grpo", "dr_grpo"])
def test_a_group_estimator_needs_a_group(advantage: str) -> None:
    with pytest.raises(RecipeError, match=f"{advantage} needs groups of at least 2"):
        resolved("decoupled_ppo", {"advantage": advantage}, group=1)
    assert resolved("decoupled_ppo", {"advantage": advantage}, group=2)
    assert resolved("decoupled_ppo", {"advantage": "return"}, group=1)


def test_a_refused_recipe_is_a_config_error() -> None:
    assert issubclass(RecipeError, ConfigError)
