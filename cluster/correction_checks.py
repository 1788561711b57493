"""Rules about the correction: whether it can be composed, fed, and whether it corrects at all."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from cluster.head_checks import heads_fit
from correction.errors import ConfigError, RecipeError

if TYPE_CHECKING:
    from cluster.config import RunConfig
    from correction.recipes import Recipe


def correction_fits(config: RunConfig) -> str | None:
    """Compose it: unknown names and parts, wrong combinations, unmet needs, lag left alone, heads
    that nothing could hold."""
    from correction.recipes import resolve

    correction, lag = config.correction, config.lag.max_lag_versions
    overrides = {**correction.overrides, "allow_no_correction": True}
    try:
        recipe = resolve(
            correction.recipe,
            overrides,
            max_lag_versions=lag,
            group_size=config.rollout.group_size,
        )
    except RecipeError as error:
        return str(error)
    return (
        _unmet_need(config, recipe)
        or _filter_has_groups(config, recipe)
        or _overlong_within_limit(config, recipe)
        or _helpers_are_there(config, recipe)
        or _lag_is_corrected(config, recipe)
        or heads_fit(config, recipe.head_tokens)
    )


def _unmet_need(config: RunConfig, recipe: Recipe) -> str | None:
    """What the recipe cannot do without and nothing in the run gives."""
    from correction.needs import Need

    name = config.correction.recipe
    for need, maker in (
        (Need.TEACHER, "scores of a teacher"),
        (Need.SEGMENTS, "rollouts that branch"),
        (Need.EXPERT, "tokens of an expert"),
    ):
        if need in recipe.needs:
            return (
                f"correction.recipe = {name!r}: needs {maker}, and no run has them yet; choose "
                "another recipe"
            )
    return None


def _filter_has_groups(config: RunConfig, recipe: Recipe) -> str | None:
    """A group of one is never mixed: nothing would ever be trained."""
    if recipe.group_filter == "none" or config.rollout.group_size > 1:
        return None
    return (
        f"correction.group_filter = {recipe.group_filter.value!r}: needs groups of at least 2, but "
        f"rollout.group_size = {config.rollout.group_size}; raise it or set group_filter = none"
    )


def _overlong_within_limit(config: RunConfig, recipe: Recipe) -> str | None:
    """A penalty that begins beyond what a trajectory can have never acts."""
    from correction.shaping_parts import OverlongPenalty

    limit = config.rollout.max_turns * config.rollout.max_turn_tokens
    for part in recipe.shaping:
        if isinstance(part, OverlongPenalty) and part.max_tokens > limit:
            return (
                f"correction.shaping.overlong_penalty.max_tokens = {part.max_tokens}: a trajectory "
                f"has at most {limit} sampled tokens (rollout.max_turns x "
                "rollout.max_turn_tokens); 0 takes that limit"
            )
    return None


def _helpers_are_there(config: RunConfig, recipe: Recipe) -> str | None:
    """Critic, reference and pretraining text, as far as the recipe needs them."""
    from cluster import assembly
    from cluster.model_source import check_helper_model
    from correction.needs import Need

    try:
        assembly.critic_settings(config, recipe)
        text = assembly.pretraining_settings(config, recipe)
        if text is not None:
            text.check_shared(config.learner.ranks)
        if Need.VALUES in recipe.needs and config.critic.path is not None:
            check_helper_model("critic.path", config.critic.path)
        if Need.REFERENCE in recipe.needs and config.reference.path is not None:
            check_helper_model("reference.path", config.reference.path)
    except ConfigError as error:
        return str(error)
    if text is not None and not Path(text.path).is_file():
        return f"pretraining.path = {text.path!r}: there is no such file"
    return None


def _lag_is_corrected(config: RunConfig, recipe: Recipe) -> str | None:
    correction, lag = config.correction, config.lag.max_lag_versions
    if lag == 0 or correction.none or recipe.corrects_lag or recipe.is_imitation:
        return None
    return (
        f"correction.recipe = {correction.recipe!r}: corrects for no lag, but "
        f"lag.max_lag_versions = {lag}; set it to 0, choose a recipe that corrects, or say "
        "correction.none = true to go without"
    )
