"""Rules between the fields of a configuration: what could deadlock, starve or teach nothing.

Each rule is one short function: a configuration in, a problem or None out. All problems are
reported together, before anything is started. Cheap rules come first; those that look at the disk
or load torch are asked only where the others found nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from cluster.correction_checks import correction_fits
from cluster.derived import group_bytes, needed_resources, queue_groups
from correction.errors import ConfigError
from learner.schedule import most_versions

if TYPE_CHECKING:
    from pathlib import Path

    from cluster.config import RunConfig

Problem = str | None


def check_config(config: RunConfig) -> None:
    """Apply every rule. Raises ConfigError with all problems, a line each."""
    problems = _found(RULES, config) or _found(LATE_RULES, config)
    if problems:
        raise ConfigError("\n  ".join(["the configuration cannot run:", *problems]))


def check_resources(config: RunConfig, resources: Mapping[str, float]) -> None:
    """Compare with what the cluster has. resources: {"CPU": ..., "GPU": ...}, as Ray says it.

    Raises ConfigError that names the keys which ask for more.
    """
    actors, learner = config.actors, config.learner
    problems = []
    for kind, per_actor, per_rank in (
        ("CPU", actors.num_cpus, learner.num_cpus),
        ("GPU", actors.num_gpus, learner.num_gpus),
    ):
        needed = needed_resources(config)[kind]
        there = resources.get(kind, 0.0)
        if needed > there:
            key = f"num_{kind.lower()}s"
            problems.append(
                f"{needed:g} {kind}s are needed (actors.count = {actors.count} x actors.{key} = "
                f"{per_actor:g}, learner.ranks = {learner.ranks} x learner.{key} = {per_rank:g}) "
                f"but the cluster has {there:g}: lower one of them or add nodes"
            )
    if problems:
        raise ConfigError("\n  ".join(["the cluster is too small:", *problems]))


def check_texts(config: RunConfig, model_path: Path) -> None:
    """Try the model's tokenizer on the environment: its chat template and the stop texts.

    Raises ConfigError. Needs the model, which for a starter has to be made first.
    """
    from actors.environment import make_family
    from actors.renderer import make_renderer

    make_renderer(model_path, make_family(config.environment.name, config.environment.options))


def _found(rules: tuple[Callable[[RunConfig], Problem], ...], config: RunConfig) -> list[str]:
    return [problem for rule in rules if (problem := rule(config))]


def _reuse_within_lag(config: RunConfig) -> Problem:
    added, bound = config.learner.max_reuse - 1, config.lag.max_lag_versions
    if added <= bound:
        return None
    return (
        f"learner.max_reuse = {config.learner.max_reuse}: the last pass over a batch lags by "
        f"{added}, more than lag.max_lag_versions = {bound}; reuse at most {bound + 1} times "
        "or allow more lag"
    )


def _broadcast_within_lag(config: RunConfig) -> Problem:
    every, lag, reuse = (
        config.broadcast.every_versions,
        config.lag.max_lag_versions,
        config.learner.max_reuse,
    )
    most = most_versions(lag, reuse)
    if every <= most:
        return None
    return (
        f"broadcast.every_versions = {every}: engines would starve between broadcasts; with "
        f"lag.max_lag_versions = {lag} and learner.max_reuse = {reuse} it can be at most {most}"
    )


def _queue_holds_the_lag(config: RunConfig) -> Problem:
    if config.queue.max_groups is None or _reuse_within_lag(config):
        return None
    needed = queue_groups(config)
    if config.queue.max_groups >= needed:
        return None
    return (
        f"queue.max_groups = {config.queue.max_groups}: too small for the lag; "
        f"lag.max_lag_versions = {config.lag.max_lag_versions} with learner.groups_per_step = "
        f"{config.learner.groups_per_step} admits up to {needed} groups; raise it or leave it out"
    )


def _queue_holds_the_bytes(config: RunConfig) -> Problem:
    if _reuse_within_lag(config):
        return None
    tokens = config.rollout.group_size * config.engine.max_context_tokens
    needed = queue_groups(config) * group_bytes(config)
    if config.queue.max_bytes >= needed:
        return None
    return (
        f"queue.max_bytes = {config.queue.max_bytes}: the lag bound admits {queue_groups(config)} "
        f"groups of up to {tokens} tokens, about {needed} bytes"
    )


def _turns_fit_the_context(config: RunConfig) -> Problem:
    rollout, context = config.rollout, config.engine.max_context_tokens
    sampled = rollout.max_turns * rollout.max_turn_tokens
    if sampled < context:
        return None
    return (
        f"engine.max_context_tokens = {context}: rollout.max_turns = {rollout.max_turns} x "
        f"rollout.max_turn_tokens = {rollout.max_turn_tokens} can sample {sampled} tokens, which "
        "leaves no room for the prompt"
    )


def _trajectory_fits_a_micro_batch(config: RunConfig) -> Problem:
    most, context = config.learner.micro_batch_tokens, config.engine.max_context_tokens
    if most >= context:
        return None
    return (
        f"learner.micro_batch_tokens = {most}: a trajectory may have "
        f"engine.max_context_tokens = {context}, and is never split"
    )


def _environment_within_episode(config: RunConfig) -> Problem:
    call, episode = config.rollout.environment_deadline_s, config.rollout.episode_deadline_s
    if call <= episode:
        return None
    return (
        f"rollout.environment_deadline_s = {call:g}: one call may not outlast "
        f"rollout.episode_deadline_s = {episode:g}"
    )


def _swap_within_broadcast(config: RunConfig) -> Problem:
    swap, engine = config.engine.swap_deadline_s, config.broadcast.engine_deadline_s
    if swap <= engine:
        return None
    return (
        f"engine.swap_deadline_s = {swap:g}: a swap may not outlast "
        f"broadcast.engine_deadline_s = {engine:g}, after which the engine is given up"
    )


def _stall_outlasts_deadlines(config: RunConfig) -> Problem:
    deadlines = {
        "rollout.episode_deadline_s": config.rollout.episode_deadline_s,
        "broadcast.engine_deadline_s": config.broadcast.engine_deadline_s,
    }
    key, longest = max(deadlines.items(), key=lambda item: item[1])
    if config.run.stall_timeout_s > longest:
        return None
    return (
        f"run.stall_timeout_s = {config.run.stall_timeout_s:g}: must be more than {key} = "
        f"{longest:g}, or the run is stopped before the deadline can act"
    )


def _lease_outlasts_stall(config: RunConfig) -> Problem:
    lease, stall = config.queue.lease_s, config.run.stall_timeout_s
    if lease > stall:
        return None
    return (
        f"queue.lease_s = {lease:g}: must be more than run.stall_timeout_s = {stall:g}, or a "
        "batch is given out again while the learner still works on it"
    )


def _ranks_have_work(config: RunConfig) -> Problem:
    """Also when every group has lost all members but those that it needs."""
    groups, survivors = config.learner.groups_per_step, min(2, config.rollout.group_size)
    if config.learner.ranks <= groups * survivors:
        return None
    return (
        f"learner.ranks = {config.learner.ranks}: a batch of learner.groups_per_step = {groups} "
        f"groups, of which {survivors} members must survive, may hold only {groups * survivors} "
        "trajectories to share"
    )


def _masters_are_kept(config: RunConfig) -> Problem:
    if config.learner.zero_stage > 0 or config.model.dtype == "float32":
        return None
    return (
        f"learner.zero_stage = 0: model.dtype = {config.model.dtype!r} needs stage 1, 2 or 3, "
        "which keep float32 masters"
    )


def _warmup_ends(config: RunConfig) -> Problem:
    if config.learner.warmup_steps <= config.run.max_steps:
        return None
    return (
        f"learner.warmup_steps = {config.learner.warmup_steps}: the run ends before, at "
        f"run.max_steps = {config.run.max_steps}"
    )


def _engine_runs_on_cpu(config: RunConfig) -> Problem:
    engine = config.engine
    if config.actors.num_gpus > 0:
        return None
    if not engine.enforce_eager:
        return "engine.enforce_eager = false: must be true where actors.num_gpus = 0"
    if engine.kv_cache_bytes == 0:
        return "engine.kv_cache_bytes = 0: must be given where actors.num_gpus = 0"
    return None


def _engine_has_its_gpus(config: RunConfig) -> Problem:
    parallel, gpus = config.engine.tensor_parallel_size, config.actors.num_gpus
    if parallel <= max(1.0, gpus):
        return None
    return (
        f"engine.tensor_parallel_size = {parallel}: needs as many GPUs, but "
        f"actors.num_gpus = {gpus:g}"
    )


def _no_correction_is_meant(config: RunConfig) -> Problem:
    if "allow_no_correction" not in config.correction.overrides:
        return None
    return "correction.overrides.allow_no_correction: say correction.none = true instead"


def _model_is_there(config: RunConfig) -> Problem:
    """Finds the model, which must be one whose weights can be swapped."""
    from cluster.model_source import find_model

    try:
        folder = find_model(config)
    except ConfigError as error:
        return str(error)
    return None if folder is None else _context_fits_the_model(config, folder)


def _context_fits_the_model(config: RunConfig, folder: Path) -> Problem:
    from cluster.model_source import longest_context_tokens

    context, longest = config.engine.max_context_tokens, longest_context_tokens(folder)
    if longest is None or context <= longest:
        return None
    return (
        f"engine.max_context_tokens = {context}: the model in {folder} was made for at most "
        f"{longest} (max_position_embeddings)"
    )


def _environment_is_known(config: RunConfig) -> Problem:
    """Builds the environment family and the first task of each split."""
    from actors.environment import make_family

    name = config.environment.name
    try:
        family = make_family(name, config.environment.options)
        for split in ("train", "heldout"):
            family.task(split, 0)
    except ConfigError as error:
        return str(error)
    except Exception as error:  # environments are other people's code
        return f"environment.name = {name!r}: makes no task: {type(error).__name__}: {error}"
    return None


RULES: tuple[Callable[[RunConfig], Problem], ...] = (
    _reuse_within_lag,
    _broadcast_within_lag,
    _queue_holds_the_lag,
    _queue_holds_the_bytes,
    _turns_fit_the_context,
    _trajectory_fits_a_micro_batch,
    _environment_within_episode,
    _swap_within_broadcast,
    _stall_outlasts_deadlines,
    _lease_outlasts_stall,
    _ranks_have_work,
    _masters_are_kept,
    _warmup_ends,
    _engine_runs_on_cpu,
    _engine_has_its_gpus,
    _no_correction_is_meant,
)
"""Rules that need nothing but the configuration."""

LATE_RULES: tuple[Callable[[RunConfig], Problem], ...] = (
    _model_is_there,
    _environment_is_known,
    correction_fits,
)
"""Rules that look at the disk or load torch."""
