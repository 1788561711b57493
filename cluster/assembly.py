"""From the resolved configuration to the settings of each part (pure, but for the last function).

Every part has its own settings record and knows nothing of the run configuration; this is the only
place that knows both.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.rollout import RolloutLimits
from actors.settings import ActorSettings
from actors.trajectory.record import KvMode
from actors.vllm_settings import VllmSettings, engine_environment
from actors.weight_segment import default_segment_directory
from cluster.config import RunConfig
from cluster.derived import lag_budget, queue_groups
from cluster.fleet import FleetPolicy, actor_identity
from cluster.trajectory_queue.records import QueuePolicy
from correction.errors import ConfigError
from correction.needs import Need
from correction.recipes import Recipe, resolve
from learner.loop import LoopLimits
from learner.schedule import BroadcastSchedule, most_versions
from learner.settings import (
    CriticSettings,
    LearnerSettings,
    OptimiserSettings,
    PretrainingSettings,
    ReferenceSettings,
)

if TYPE_CHECKING:
    from cluster.fleet import LaunchActor

START_DEADLINE_S = 600.0
"""Longest start of an engine or a rank; large models load slowly."""
ANSWER_DEADLINE_S = 20.0
"""How long a rollout actor may take to answer a question about its state."""


def queue_policy(config: RunConfig, run_id: str) -> QueuePolicy:
    """Thresholds of the trajectory queue."""
    return QueuePolicy(
        run_id=run_id,
        budget=lag_budget(config),
        group_size=config.rollout.group_size,
        max_groups=config.queue.max_groups or queue_groups(config),
        max_bytes=config.queue.max_bytes,
        lease_s=config.queue.lease_s,
        min_survivors=min(2, config.rollout.group_size),
        total_steps=config.run.max_steps,
        max_filtered_in_a_row=config.rollout.max_filtered_in_a_row,
        head_tokens=recipe(config).head_tokens,
    )


def recipe(config: RunConfig) -> Recipe:
    """The correction, composed and checked against the run."""
    overrides: dict[str, object] = dict(config.correction.overrides)
    if config.correction.none:
        overrides["allow_no_correction"] = True
    return resolve(
        config.correction.recipe,
        overrides,
        max_lag_versions=config.lag.max_lag_versions,
        group_size=config.rollout.group_size,
    )


def learner_settings(config: RunConfig, run_id: str, model_path: Path) -> LearnerSettings:
    """What every learner rank is told."""
    learner, composed = config.learner, recipe(config)
    return LearnerSettings(
        run_id=run_id,
        model_path=str(model_path),
        recipe=composed,
        critic=critic_settings(config, composed),
        reference=(
            ReferenceSettings(config.reference.path) if Need.REFERENCE in composed.needs else None
        ),
        pretraining=pretraining_settings(config, composed),
        optimiser=OptimiserSettings(
            learning_rate=learner.learning_rate,
            warmup_steps=learner.warmup_steps,
            betas=learner.betas,
            weight_decay=learner.weight_decay,
            gradient_clip=learner.gradient_clip,
        ),
        dtype=config.model.dtype,
        engine_dtype=config.model.dtype,
        zero_stage=learner.zero_stage,
        max_reuse=learner.max_reuse,
        micro_batch_tokens=learner.micro_batch_tokens,
        max_trajectory_tokens=config.rollout.max_turns * config.rollout.max_turn_tokens,
        seed=config.run.seed,
        threads=learner.threads,
        bucket_bytes=config.broadcast.bucket_bytes,
        canary_tolerance=config.engine.canary_tolerance,
    )


def critic_settings(config: RunConfig, composed: Recipe) -> CriticSettings:
    """The critic, where the recipe needs values."""
    if Need.VALUES not in composed.needs:
        return CriticSettings()
    return CriticSettings(
        kind=config.critic.kind,
        path=config.critic.path,
        learning_rate=config.critic.learning_rate,
        detach_trunk=config.critic.detach_trunk,
    )


def pretraining_settings(config: RunConfig, composed: Recipe) -> PretrainingSettings | None:
    """The text to mix in, where the recipe asks for it. Raises ConfigError without a path."""
    text = config.pretraining
    if Need.PRETRAINING not in composed.needs:
        return None
    if text.path is None:
        raise ConfigError(
            f"correction.recipe = {config.correction.recipe!r}: needs text to mix in; set "
            "pretraining.path to a local .jsonl, .txt or .parquet file, or take the pretraining "
            "penalty out"
        )
    return PretrainingSettings(
        path=text.path,
        field=text.field,
        tokens_per_step=text.tokens_per_step,
        block_tokens=text.block_tokens,
    )


def broadcast_schedule(config: RunConfig) -> BroadcastSchedule:
    """When to broadcast."""
    return BroadcastSchedule(
        kind=config.broadcast.schedule,
        every_versions=config.broadcast.every_versions,
        most_versions=most_versions(config.lag.max_lag_versions, config.learner.max_reuse),
    )


def loop_limits(config: RunConfig) -> LoopLimits:
    """When the learner's loop ends by itself."""
    return LoopLimits(
        max_steps=config.run.max_steps,
        max_wall_s=config.run.max_wall_s,
        stall_timeout_s=config.run.stall_timeout_s,
        max_non_finite_steps=config.learner.max_non_finite_steps,
    )


def fleet_policy(config: RunConfig) -> FleetPolicy:
    """Deadlines and budgets of the rollout actors."""
    return FleetPolicy(
        replicas=config.actors.count,
        start_deadline_s=START_DEADLINE_S,
        swap_deadline_s=config.engine.swap_deadline_s,
        engine_deadline_s=config.broadcast.engine_deadline_s,
        answer_deadline_s=ANSWER_DEADLINE_S,
        max_restarts=config.actors.max_restarts,
    )


def actor_settings(
    config: RunConfig, run_id: str, model_path: Path, name: str, seed: int
) -> ActorSettings:
    """What one rollout actor is told."""
    rollout, engine = config.rollout, config.engine
    return ActorSettings(
        name=name,
        run_id=run_id,
        engine=VllmSettings(
            model_path=model_path,
            segment_directory=default_segment_directory(run_id),
            dtype=config.model.dtype,
            max_context_tokens=engine.max_context_tokens,
            max_running_requests=engine.max_running_requests,
            kv_cache_bytes=engine.kv_cache_bytes or None,
            gpu_memory_utilization=engine.gpu_memory_utilization,
            threads=engine.threads,
            enforce_eager=engine.enforce_eager,
            kv_mode=KvMode(engine.kv_mode),
            head_tokens=recipe(config).head_tokens,
            seed=seed,
            tensor_parallel_size=engine.tensor_parallel_size,
            device="cuda" if config.actors.num_gpus else "cpu",
        ),
        environment=config.environment.name,
        environment_options=config.environment.options,
        temperature=rollout.temperature,
        max_turn_tokens=rollout.max_turn_tokens,
        limits=RolloutLimits(
            max_turns=rollout.max_turns,
            episode_deadline_s=rollout.episode_deadline_s,
            environment_deadline_s=rollout.environment_deadline_s,
        ),
        groups_in_flight=config.actors.groups_in_flight,
        group_filter=recipe(config).group_filter,
    )


def actor_launcher(config: RunConfig, run_id: str, model_path: Path) -> LaunchActor:
    """Creates rollout actors; a restarted one samples from another seed."""
    import ray

    from actors.pool import RolloutActor

    remote = ray.remote(
        num_cpus=config.actors.num_cpus, num_gpus=config.actors.num_gpus, max_restarts=0
    )(RolloutActor)

    def launch(name: str, incarnation: int) -> Any:  # noqa: ANN401
        number = int(name.rpartition("-")[2])
        seed = config.run.seed + 1000 * number + incarnation
        identity = actor_identity(name, incarnation)
        settings = actor_settings(config, run_id, model_path, identity, seed)
        environment = engine_environment(settings.engine)
        return remote.options(
            runtime_env={"env_vars": environment}, scheduling_strategy="SPREAD"
        ).remote(settings)

    return launch
