"""One learner rank as a plain object: train, gather weights, save. A Ray shell wraps it elsewhere.

Contract
    consumes    trajectory groups as bytes, the version that the caller believes in
    produces    StepReports (the same on every rank), packed weights with manifest and canary,
                a policy folder
    waits for   the other ranks, never longer than settings.timeout_s
    invariants  the version moves by one with each applied optimiser step and with nothing else;
                whatever fails raises, and the rank must then be replaced together with its group

Every method but the properties must be called on all ranks with the same arguments.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from actors.trajectory.codec import decode_group
from actors.weight_packing import PackedWeights, UInt8, pack
from actors.weights import Canary, WeightManifest
from correction.errors import RunError
from correction.versions import PolicyVersion
from learner.batch import assemble
from learner.deepspeed_engine import DeepSpeedEngine
from learner.policy_model import plain_policy, score_plain, write_policy
from learner.pretraining import PretrainingStream, open_stream
from learner.settings import LearnerSettings, RankPlace
from learner.step import LearnerStep, StepReport

CANARY_TOLERANCE = {"float32": 1e-3, "float16": 0.125, "bfloat16": 1.0}
"""Largest |engine - learner| logprob that is arithmetic, not other weights, by dtype."""


class GatheredWeights(NamedTuple):
    """Weights ready to travel. buckets: uint8 arrays, overwritten by the next gather."""

    buckets: tuple[UInt8, ...]
    manifest: WeightManifest
    phases_s: dict[str, float]


class LearnerRank:
    """One rank of the learner."""

    def __init__(
        self,
        settings: LearnerSettings,
        place: RankPlace,
        version: PolicyVersion = PolicyVersion(0, 0),  # noqa: B008
    ) -> None:
        """Load the model and join the group. All ranks; returns when all have joined.

        version: of the weights in `settings.model_path`.
        """
        self._settings = settings
        self._engine = DeepSpeedEngine(settings, place, applied_steps=version.step)
        self._step = LearnerStep(self._engine, settings, _stream(settings, place))
        self._version = version
        self._buckets: tuple[UInt8, ...] = ()

    @property
    def version(self) -> PolicyVersion:
        """Version of the weights that this rank holds."""
        return self._version

    def train(self, payloads: Sequence[bytes], version: PolicyVersion) -> list[StepReport]:
        """Train one batch of encoded trajectory groups; one report a pass. All ranks.

        version: the caller's idea of the learner's version. Raises RunError where it is wrong,
        TrajectoryError for bytes that are not a valid group of this run up to this version, and
        InputError for a batch that cannot be trained (see `learner.batch`, `learner.step`).
        """
        if version != self._version:
            raise RunError(f"learner: asked to train version {version}, holds {self._version}")
        began = time.perf_counter()
        run_id = self._settings.run_id
        groups = [decode_group(p, run_id=run_id, learner_version=version) for p in payloads]
        batch = assemble(groups)
        decode_s = time.perf_counter() - began
        reports = self._step.run(batch, version)
        self._version = reports[-1].version
        first = replace(reports[0], phases_s={"decode": decode_s, **reports[0].phases_s})
        return [first, *reports[1:]]

    def gather(self) -> GatheredWeights | None:
        """Weights of the current version in the engines' dtype, packed, with a canary. All ranks.

        Rank 0 returns them, the others None.
        """
        began = time.perf_counter()
        canary = self._canary()
        scored = time.perf_counter()
        state = self._engine.full_state(self._settings.engine_dtype)
        if self._engine.rank != 0:
            list(state)
            return None
        packed = pack(state, self._settings.bucket_bytes, reuse=self._buckets)
        self._buckets = packed.buckets
        manifest = self._manifest(packed, canary)
        phases_s = {"canary": scored - began, "pack": time.perf_counter() - scored}
        return GatheredWeights(packed.buckets, manifest, phases_s)

    def save_policy(self, folder: str) -> None:
        """Write the policy in the engines' dtype as a folder (safetensors). All ranks."""
        weights = dict(self._engine.full_state(self._settings.engine_dtype))
        if self._engine.rank == 0:
            model = plain_policy(self._engine.model, weights)
            write_policy(model, self._settings.model_path, Path(folder))

    def close(self) -> None:
        """Leave the group. Idempotent."""
        self._engine.close()

    def _manifest(self, packed: PackedWeights, canary: Canary) -> WeightManifest:
        return WeightManifest(
            run_id=self._settings.run_id,
            version=self._version,
            tensors=packed.entries,
            bucket_bytes=tuple(len(bucket) for bucket in packed.buckets),
            bucket_checksums=packed.checksums,
            canary=canary,
        )

    def _canary(self) -> Canary:
        """Score fixed tokens with the weights as the engines will hold them.

        Where both dtypes agree the model in training scores, so that the canary also proves the
        gathering. Otherwise a plain model is put together from the rounded weights.
        """
        dtype = self._settings.engine_dtype
        ids = self._engine.canary_ids
        if dtype == self._settings.dtype:
            logprobs = self._engine.score_ids(ids)
        else:
            weights = dict(self._engine.full_state(dtype))
            model = plain_policy(self._engine.model, weights) if weights else None
            logprobs = score_plain(model, ids) if model is not None else []
        tolerance = self._settings.canary_tolerance or CANARY_TOLERANCE[dtype]
        return Canary(ids, tuple(logprobs), tolerance)


def _stream(settings: LearnerSettings, place: RankPlace) -> PretrainingStream | None:
    if settings.pretraining is None:
        return None
    return open_stream(
        settings.pretraining, model_path=settings.model_path, seed=settings.seed, place=place
    )
