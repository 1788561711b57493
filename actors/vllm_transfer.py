"""Runs inside vLLM's own process: loads a shared-memory segment into the model.

Importing this module registers the backend with vLLM. vLLM imports it by name, as the module of
`worker_extension_cls`, before it builds the model, so no plugin has to be installed. Only metadata
comes over vLLM's message queue: the name of the segment and the manifest as plain JSON values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from actors.weight_segment import open_segment
from actors.weights import Canary, SwapRequest, TensorEntry, WeightManifest
from correction.errors import SwapError
from correction.versions import PolicyVersion

BACKEND = "lagwise_segment"
WORKER_EXTENSION = f"{__name__}.SegmentWorkerExtension"


class SegmentWorkerExtension:
    """Named to vLLM only so that it imports this module; adds no methods to its worker."""


@dataclass
class SegmentInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Nothing to agree on beforehand."""


@dataclass
class SegmentUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """One whole policy version: a segment and its manifest, as `update_info` made them."""

    directory: str
    segment: str
    manifest: dict[str, Any]


def update_info(request: SwapRequest, directory: Path) -> dict[str, Any]:
    """What is sent to the process of the model: JSON values only. The canary stays here."""
    manifest = asdict(request.manifest)
    manifest["version"] = str(request.manifest.version)
    del manifest["canary"]
    return {"directory": str(directory), "segment": request.segment, "manifest": manifest}


def manifest_of(plain: Mapping[str, Any]) -> WeightManifest:
    """Inverse of `update_info`, without a canary."""
    return WeightManifest(
        run_id=plain["run_id"],
        version=PolicyVersion.parse(plain["version"]),
        tensors=tuple(
            TensorEntry(**{**entry, "shape": tuple(entry["shape"])}) for entry in plain["tensors"]
        ),
        bucket_bytes=tuple(plain["bucket_bytes"]),
        bucket_checksums=tuple(plain["bucket_checksums"]),
        canary=Canary((), (), 0.0),
    )


class SegmentTransferEngine(
    WeightTransferEngine[SegmentInitInfo, SegmentUpdateInfo]  # type: ignore[misc]
):
    """Loads checkpoint-format tensors out of a segment, layer by layer, and re-ties the head.

    A session is start, one update, finish. Anything that raises leaves the model half loaded: the
    engine around it must die.
    """

    init_info_cls = SegmentInitInfo
    update_info_cls = SegmentUpdateInfo

    def init_transfer_engine(self, init_info: SegmentInitInfo) -> None:
        """Nothing to set up: a segment is found by its name."""

    def start_weight_update(self) -> None:
        """Take the old parameters aside and make room for new ones."""
        self._held = ExitStack()
        self._loaded: set[str] = set()
        # Tied parameters appear once here, and twice below: the meta copies are no longer tied.
        self._wanted = {name for name, _ in self.model.named_parameters()}
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: SegmentUpdateInfo) -> None:
        """Feed every tensor of the segment to the model's own loader.

        The checksums were compared by the process that asked, before generation was paused. The
        loaders keep tensors until their layer is complete, so the segment stays open to the end.
        """
        manifest = manifest_of(update_info.manifest)
        tensors = self._held.enter_context(
            open_segment(Path(update_info.directory), update_info.segment, manifest, verify=False)
        )
        consumed: list[str] = []
        self._loaded |= self.model.load_weights(_recorded(tensors, consumed)) or set()
        if ignored := set(tensors) - set(consumed):
            raise SwapError(f"the model's loader did not take {sorted(ignored)[:5]}")

    def finish_weight_update(self) -> None:
        """Put the new parameters in place; raises SwapError if one of them was not loaded."""
        finalize_layerwise_reload(self.model, self.model_config)
        self._held.close()
        if missing := self._wanted - self._loaded:
            raise SwapError(f"parameters without new weights: {sorted(missing)[:5]}")
        _repack_tied_heads(self.model, self._loaded)

    def shutdown(self) -> None:
        """Nothing is held between updates."""


def _recorded(
    tensors: Mapping[str, torch.Tensor], consumed: list[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in tensors.items():
        consumed.append(name)
        yield name, tensor


def _repack_tied_heads(model: torch.nn.Module, loaded: set[str]) -> None:
    """Give a head that shares its weight with the embedding the new values, too.

    On CPU the head computes with a packed copy of its weight; vLLM's layerwise reload renews that
    copy only for layers that were loaded themselves, which a tied head is not. Without this the
    swap seems to work and every logprob is wrong.
    """
    embeddings = {
        module.weight.data_ptr(): module
        for name, module in model.named_modules()
        if f"{name}.weight" in loaded and hasattr(module, "weight")
    }
    for name, module in model.named_modules():
        if not isinstance(module, ParallelLMHead) or f"{name}.weight" in loaded:
            continue
        if module.weight.data_ptr() not in embeddings:
            raise SwapError(f"{name} was not loaded and is not tied to a layer that was")
        module.quant_method.process_weights_after_loading(module)


WeightTransferEngineFactory.register_engine(BACKEND, SegmentTransferEngine)
