"""Rules about the correction: whether it can be composed, fed, and whether it corrects at all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.head_checks import heads_fit
from correction.errors import RecipeError

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
        or _lag_is_corrected(config, recipe)
        or heads_fit(config, recipe.head_tokens)
    )


def _unmet_need(config: RunConfig, recipe: Recipe) -> str | None:
    """What the recipe cannot do without and nothing in the run gives."""
    from correction.needs import Need

    name = config.correction.recipe
    for need, maker in (
        (Need.TEACHER, "teacher that scores trajectories"),
        (Need.SEGMENTS, "rollout that branches"),
        (Need.EXPERT, "expert that labels states"),
    ):
        if need in recipe.needs:
            return (
                f"correction.recipe = {name!r}: needs what a {maker} gives, and no run has one "
                "yet; choose another recipe"
            )
    if Need.PRETRAINING in recipe.needs and config.pretraining.path is None:
        return (
            f"correction.recipe = {name!r}: needs text to mix in; set pretraining.path to a local "
            ".jsonl, .txt or .parquet file, or take the pretraining penalty out"
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


def _lag_is_corrected(config: RunConfig, recipe: Recipe) -> str | None:
    correction, lag = config.correction, config.lag.max_lag_versions
    if lag == 0 or correction.none or recipe.corrects_lag or recipe.is_imitation:
        return None
    return (
        f"correction.recipe = {correction.recipe!r}: corrects for no lag, but "
        f"lag.max_lag_versions = {lag}; set it to 0, choose a recipe that corrects, or say "
        "correction.none = true to go without"
    )
