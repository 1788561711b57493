"""The learner step of a 0.5B model: counted, and timed by what one core reaches in its products.

    FLOPs   6 N tokens + 6 layers T^2 width trajectories    (forward 1, backward 2; causal half)
    time    FLOPs / FLOP per s that the core reaches in this model's own matrix products, float32

The softmax over the vocabulary, norms and the optimiser are left off, so the real step is slower
and the share of a correction smaller than what is derived from it. Of the bytes only the logits'
are counted: four passes (written, read for the loss, gradient written and read).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """What a decoder's matrix products are counted from; Qwen2.5-0.5B (embeddings tied)."""

    layers: int = 24
    width: int = 896
    key_value_width: int = 128
    hidden: int = 4864
    vocabulary: int = 151_936

    @property
    def products(self) -> dict[tuple[int, int], int]:
        """Matrix products of one token: their (in, out) sizes, and how often."""
        of_layers = {
            (self.width, self.width): 2,
            (self.width, self.key_value_width): 2,
            (self.width, self.hidden): 2,
            (self.hidden, self.width): 1,
        }
        by_size = {size: count * self.layers for size, count in of_layers.items()}
        return by_size | {(self.width, self.vocabulary): 1}

    @property
    def parameters(self) -> int:
        """N: parameters that are multiplied with every token."""
        return sum(rows * columns * count for (rows, columns), count in self.products.items())

    def step_flops(self, trajectories: int, tokens: int) -> float:
        """FLOPs of forward and backward; formula: module docstring."""
        dense = 6.0 * self.parameters * trajectories * tokens
        return dense + 6.0 * self.layers * tokens**2 * self.width * trajectories

    def logit_bytes(self, trajectories: int, tokens: int) -> float:
        """Four passes over the logits, float32."""
        return 4.0 * 4.0 * trajectories * tokens * self.vocabulary


def learner_step(shape: ModelShape, trajectories: int, tokens: int) -> dict[str, float]:
    """FLOPs, bytes and derived seconds of a step on this core, and what the core reaches."""
    flops = shape.step_flops(trajectories, tokens)
    rate = _flops_per_s(shape)
    return {
        "parameters": shape.parameters,
        "flops": flops,
        "core_flops_per_s": round(rate),
        "seconds_on_this_core": round(flops / rate, 1),
        "logit_bytes": shape.logit_bytes(trajectories, tokens),
        "memory_bytes_per_s": round(_bytes_per_s()),
    }


def _flops_per_s(shape: ModelShape, tokens: int = 256) -> float:
    """FLOPs a second of one token's matrix products, each at its own speed."""
    import torch

    flops, seconds = 0.0, 0.0
    for (rows, columns), count in shape.products.items():
        left, right = torch.randn(tokens, rows), torch.randn(rows, columns)
        flops += 2.0 * tokens * rows * columns * count
        seconds += count * median_s(lambda a=left, b=right: a @ b, rounds=5)  # type: ignore[misc]
    return flops / seconds


def _bytes_per_s(size: int = 2**26) -> float:
    """Bytes read and written a second, copying 256 MiB."""
    import torch

    source = torch.randn(size)
    target = torch.empty_like(source)
    return 2 * 4 * size / median_s(lambda: target.copy_(source), rounds=7)


def median_s(function: Callable[[], object], rounds: int) -> float:
    """Median seconds of a call, after one that is not counted."""
    function()
    return statistics.median(_seconds(function) for _ in range(rounds))


def _seconds(function: Callable[[], object]) -> float:
    began = time.thread_time()
    function()
    return time.thread_time() - began
