"""What does every correction cost beside the learner step of a 0.5B model, and beside the peers'?

The policy objective of every recipe, forward and backward with its diagnostics, on [64, 4096]
tokens of float32 and one thread: medians of CPU seconds, so that other work on the machine counts
as little as it can. The learner step on the same tokens is counted, and its time derived from what
the core reaches (`_learner_step`). Bytes of a correction are those that its operations read and
write, as if nothing stayed in a cache.

The peers' functions run in the same process on the same tensors, in turns; `make peers` fetches
them, and what is not there is left off with the reason.
"""

from __future__ import annotations

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
    """Every recipe's objective: time, share of the step, and bytes against the memory's speed."""
    from benchmarks._learner_step import median_s
    from benchmarks._moved_bytes import moved_bytes
    from benchmarks._peer_pairs import batch_of
    from correction.recipes import RECIPES, Recipe
    from tests.numerics.peers.peer_objective import objective_of

    batch = batch_of(TRAJECTORIES, TOKENS)
    found = {}
    for name, recipe in RECIPES.items():

        def step(recipe: Recipe = recipe) -> None:
            target = batch.target.clone().requires_grad_()
            objective_of(recipe, batch, target).loss.backward()  # type: ignore[no-untyped-call]

        seconds, moved = median_s(step, ROUNDS), moved_bytes(step)
        found[name] = {
            "ms": round(seconds * 1e3, 1),
            "share_of_step": float(f"{seconds / step_s:.2e}"),
            "moved_mb": round(moved / 1e6),
            "moved_at_memory_speed_ms": round(moved / memory_bytes_per_s * 1e3, 1),
        }
        print(f"  {name:<28} {found[name]}", flush=True)
    return found
