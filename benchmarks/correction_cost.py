"""What does every correction cost beside the learner step of a 0.5B model, and beside the peers'?

Every recipe on [64, 4096] tokens of float32 and one thread: what it prepares once for the batch
(advantages, masks of the whole batch) and its objective, forward and backward with diagnostics;
medians of CPU seconds, so that other work on the machine counts as little as it can. The learner
step on the same tokens is counted, and its time derived from what the core reaches
(`_learner_step`). Bytes of a correction are those that its operations read and write, as if
nothing stayed in a cache.

The peers' functions run in the same process on the same tensors, in turns; `make peers` fetches
them, and what is not there is left off with the reason.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks._correction_batch import CorrectionBatch

TRAJECTORIES, TOKENS = 64, 4096
ROUNDS = 11
LIMIT = 0.03
"""Largest share of the learner step that a correction may take."""


def measure() -> dict[str, object]:
    """The learner step, every recipe beside it, and the pairs with peers.

    Raises RuntimeError where a recipe takes more than LIMIT of the step.
    """
    import torch

    from benchmarks._learner_step import ModelShape, learner_step
    from benchmarks._peer_pairs import beside_peers

    torch.set_num_threads(1)
    step = learner_step(ModelShape(), TRAJECTORIES, TOKENS)
    recipes = _recipes(step["seconds_on_this_core"], step["memory_bytes_per_s"])
    slowest = max(recipes.values(), key=lambda row: row["share_of_step"])
    if slowest["share_of_step"] > LIMIT:
        raise RuntimeError(f"over {LIMIT:.0%} of the learner step: {slowest}")
    pairs = beside_peers(TRAJECTORIES, TOKENS, ROUNDS)
    return {
        "learner_step": step,
        "limit_ms": round(LIMIT * step["seconds_on_this_core"] * 1e3),
        "recipes": recipes,
        "slowest": slowest,
        **pairs,
    }


def _recipes(step_s: float, memory_bytes_per_s: float) -> dict[str, dict[str, float]]:
    """Every recipe: preparation and objective, share of the step, bytes at the memory's speed."""
    from benchmarks._correction_batch import correction_batch, with_heads
    from benchmarks._learner_step import median_s
    from benchmarks._moved_bytes import moved_bytes
    from benchmarks._peer_pairs import batch_of
    from correction.recipes import RECIPES, Recipe

    usual = correction_batch(batch_of(TRAJECTORIES, TOKENS))
    found = {}
    for name, recipe in RECIPES.items():
        batch = with_heads(usual, recipe.head_tokens) if recipe.head_tokens else usual

        def prepared(batch: CorrectionBatch = batch, recipe: Recipe = recipe) -> None:
            batch.prepare(recipe)

        def step(batch: CorrectionBatch = batch, recipe: Recipe = recipe) -> None:
            batch.step(recipe)

        once, each = median_s(prepared, ROUNDS), median_s(step, ROUNDS)
        moved = moved_bytes(prepared) + moved_bytes(step)
        found[name] = {
            "prepare_ms": round(once * 1e3, 1),
            "objective_ms": round(each * 1e3, 1),
            "share_of_step": float(f"{(once + each) / step_s:.2e}"),
            "moved_mb": round(moved / 1e6),
            "moved_at_memory_speed_ms": round(moved / memory_bytes_per_s * 1e3, 1),
        }
        print(f"  {name:<22} {found[name]}", flush=True)
    return found
