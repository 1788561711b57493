"""What travels in a broadcast: the manifest, the swap request and its report.

The receiver owns the port: these types are the contract between the learner, which gathers and
publishes, and the engines, which verify, load and prove. Bytes travel as uint8 buckets; the
manifest says where each tensor lies and what it hashes to. Nothing here is ever unpickled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from correction.versions import PolicyVersion

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor in the packed buckets.

    name: the parameter's name in a transformers state dict. dtype: one of DTYPES.
    bucket: index of its bucket. offset_bytes, size_bytes: its place in that bucket.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    bucket: int
    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Canary:
    """What an engine must reproduce before its version moves.

    token_ids: a fixed prompt. logprobs: float log-probabilities at temperature 1 that the
    learner's new weights give to token_ids[1:], each given its prefix. tolerance: largest
    absolute difference that still counts as agreement, by dtype.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    tolerance: float


@dataclass(frozen=True, slots=True)
class WeightManifest:
    """All that is needed to verify and load one policy version.

    bucket_bytes: size of each bucket. bucket_checksums: hex digest of each (see `checksum`).
    """

    run_id: str
    version: PolicyVersion
    tensors: tuple[TensorEntry, ...]
    bucket_bytes: tuple[int, ...]
    bucket_checksums: tuple[str, ...]
    canary: Canary

    @property
    def total_bytes(self) -> int:
        """Bytes of all buckets."""
        return sum(self.bucket_bytes)


@dataclass(frozen=True, slots=True)
class SwapRequest:
    """Asks an engine to load the weights that lie in one shared-memory segment of its node.

    segment: name of the segment; its buckets lie one after the other, in order.
    deadline_s: how long pause, load and resume may take together.
    """

    manifest: WeightManifest
    segment: str
    deadline_s: float = 60.0


@dataclass(frozen=True, slots=True)
class SwapReport:
    """Outcome of a proven swap.

    phases_s: seconds of `pause`, `load`, `resume`, `verify` (the canary).
    stall_s: how long generation stood still (pause to resume).
    mismatch: largest |engine - learner| logprob on the canary.
    """

    version: PolicyVersion
    phases_s: Mapping[str, float] = field(default_factory=dict)
    stall_s: float = 0.0
    mismatch: float = 0.0
