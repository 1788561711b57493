"""LearnerRank on real DeepSpeed processes: gathering, canary, export, refusals, a silent peer."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from actors.trajectory.codec import encode_group
from actors.trajectory.record import DropReason
from actors.weights import WeightManifest
from correction.errors import InputError, RunError, TrajectoryError
from correction.versions import PolicyVersion
from learner.policy_model import CANARY_TOKENS, likely_ids
from learner.rank import LearnerRank
from learner.settings import LearnerSettings, OptimiserSettings, RankPlace
from tests.learner.learner_ranks import (
    VOCABULARY,
    Weights,
    made_up_groups,
    made_up_payloads,
    run_ranks,
    settings_for,
    unpacked,
    weights_of,
    write_tiny_model,
)

pytestmark = pytest.mark.stack

TRAINING = OptimiserSettings(learning_rate=1e-2)
START = PolicyVersion(2, 3)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    paths = {
        "tied": write_tiny_model(folder / "tied"),
        "untied": write_tiny_model(folder / "untied", tied=False),
    }
    for path in paths.values():
        (Path(path) / "tokenizer.json").write_text("{}")
    return paths


@dataclasses.dataclass(frozen=True)
class Export:
    """What rank 0 gathered and saved after one step."""

    gathered: Weights
    dtypes: set[str]
    manifest: WeightManifest
    second_manifest: WeightManifest
    reused: bool


def export_cases(
    place: RankPlace, cases: list[LearnerSettings], folders: list[str], payloads: list[bytes]
) -> list[Export | None]:
    return [
        _export(place, settings, folder, payloads)
        for settings, folder in zip(cases, folders, strict=True)
    ]


def _export(
    place: RankPlace, settings: LearnerSettings, folder: str, payloads: list[bytes]
) -> Export | None:
    rank = LearnerRank(settings, place, START)
    rank.train(payloads, START)
    gathered = rank.gather()
    if gathered is None:
        assert rank.gather() is None
        rank.save_policy(folder)
        return None
    weights = unpacked(gathered)
    dtypes = {entry.dtype for entry in gathered.manifest.tensors}
    second = rank.gather()
    assert second is not None
    reused = all(a is b for a, b in zip(gathered.buckets, second.buckets, strict=True))
    rank.save_policy(folder)
    return Export(weights, dtypes, gathered.manifest, second.manifest, reused)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return [str(tmp_path_factory.mktemp("exports") / str(number)) for number in range(5)]


@pytest.fixture(scope="module")
def exports(models: dict[str, str], folders: list[str]) -> list[Export]:
    def case(model: str, **changes: str | int) -> LearnerSettings:
        return settings_for(models[model], optimiser=TRAINING, **changes)

    cases = [
        case("tied", zero_stage=1),
        case("untied", zero_stage=3),
        case("tied", zero_stage=1, dtype="bfloat16", engine_dtype="bfloat16"),
        case("tied", zero_stage=3, dtype="bfloat16", engine_dtype="float32"),
        case("tied", zero_stage=0, engine_dtype="bfloat16"),
    ]
    first, second = run_ranks(export_cases, 2, cases, folders, made_up_payloads())
    assert second == [None] * len(cases)
    return [export for export in first if export is not None]


CASES = range(5)


@pytest.mark.parametrize("number", CASES)
def test_the_exported_policy_is_what_was_gathered(
    exports: list[Export], folders: list[str], number: int
) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folders[number], dtype="auto")
    loaded = dict(model.named_parameters())
    assert loaded.keys() == exports[number].gathered.keys()
    for name, tensor in exports[number].gathered.items():
        assert {str(loaded[name].dtype).removeprefix("torch.")} == exports[number].dtypes
        assert np.array_equal(loaded[name].detach().float().numpy(), tensor), name


@pytest.mark.parametrize("number", CASES)
def test_the_exported_policy_agrees_with_the_canary(
    exports: list[Export], folders: list[str], number: int
) -> None:
    from transformers import AutoModelForCausalLM

    canary = exports[number].manifest.canary
    model = AutoModelForCausalLM.from_pretrained(folders[number], dtype="auto")
    ids = torch.tensor([canary.token_ids])
    with torch.no_grad():
        table = torch.log_softmax(model(input_ids=ids).logits[0, :-1].float(), dim=-1)
    found = table.gather(1, ids[0, 1:, None])[:, 0]
    difference = float((found - torch.tensor(canary.logprobs)).abs().max())
    assert difference <= canary.tolerance / 10


def test_training_has_moved_the_canary_by_more_than_its_tolerance(
    exports: list[Export], models: dict[str, str]
) -> None:
    """Otherwise it would prove nothing: the old weights would pass as well."""
    from transformers import AutoModelForCausalLM

    canary = exports[0].manifest.canary
    ids = torch.tensor([canary.token_ids])
    old = AutoModelForCausalLM.from_pretrained(models["tied"])
    with torch.no_grad():
        table = torch.log_softmax(old(input_ids=ids).logits[0, :-1], dim=-1)
    found = table.gather(1, ids[0, 1:, None])[:, 0]
    assert float((found - torch.tensor(canary.logprobs)).abs().max()) > canary.tolerance


def test_the_manifest_names_run_version_and_a_fixed_canary(exports: list[Export]) -> None:
    manifest = exports[0].manifest
    assert str(manifest.version) == "2.4"
    assert manifest.run_id == "run-under-test"
    assert len(manifest.canary.token_ids) == CANARY_TOKENS
    assert all(0 <= token < VOCABULARY for token in manifest.canary.token_ids)
    assert manifest.canary.token_ids == exports[0].second_manifest.canary.token_ids


def test_the_canary_is_what_the_first_policy_finds_likely(
    exports: list[Export], models: dict[str, str]
) -> None:
    from transformers import AutoModelForCausalLM

    ids = exports[0].manifest.canary.token_ids
    start = AutoModelForCausalLM.from_pretrained(models["tied"])
    assert ids == likely_ids(start, settings_for(models["tied"]).seed)
    with torch.no_grad():
        best = start(input_ids=torch.tensor([ids])).logits[0, :-1].argmax(dim=-1)
    assert best.tolist() == list(ids[1:])


def test_gathering_again_reuses_the_buckets_and_finds_the_same(exports: list[Export]) -> None:
    for export in exports:
        assert export.reused
        assert export.manifest == export.second_manifest


def test_weights_are_rounded_once_from_their_fp32_masters(exports: list[Export]) -> None:
    # Case 3 trains in bfloat16 and gathers the fp32 masters: they hold more than bfloat16 does.
    masters = exports[3].gathered["model.embed_tokens.weight"]
    assert exports[3].dtypes == {"float32"}
    assert not np.array_equal(masters, torch.from_numpy(masters).bfloat16().float().numpy())


def test_the_folder_has_the_tokenizer_and_no_leftovers(
    exports: list[Export], folders: list[str]
) -> None:
    assert exports
    names = {path.name for path in Path(folders[0]).iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
    assert not [path for path in Path(folders[0]).parent.iterdir() if path.name.startswith(".")]


def refusals(place: RankPlace, settings: LearnerSettings) -> dict[str, str]:
    rank = LearnerRank(settings, place, PolicyVersion(0, 3))
    good = made_up_payloads()
    foreign = encode_group(dataclasses.replace(made_up_groups()[0], run_id="another run"))
    before = weights_of(rank)
    seen = {}
    for name, payloads, version in (
        ("version", good, PolicyVersion(0, 2)),
        ("epoch", good, PolicyVersion(1, 3)),
        ("foreign", [*good, foreign], rank.version),
        ("garbage", [*good, b"garbage"], rank.version),
        ("empty", [], rank.version),
    ):
        try:
            rank.train(payloads, version)
        except (RunError, TrajectoryError, InputError) as error:
            seen[name] = f"{type(error).__name__}: {error}"
    after = weights_of(rank)
    assert all(np.array_equal(before[name], after[name]) for name in before)
    assert str(rank.train(good, rank.version)[0].version) == "0.4"
    rank.close()
    rank.close()
    return seen


def test_wrong_requests_are_refused_and_harm_nothing(models: dict[str, str]) -> None:
    (seen,) = run_ranks(refusals, 1, settings_for(models["tied"]))
    assert seen["version"] == "RunError: learner: asked to train version 0.2, holds 0.3"
    assert seen["epoch"].startswith("RunError")
    assert seen["foreign"].startswith("TrajectoryError: wrong_run")
    assert seen["garbage"].startswith("TrajectoryError")
    assert seen["empty"].startswith("InputError")


def silent_peer(place: RankPlace, settings: LearnerSettings, payloads: list[bytes]) -> str:
    """Rank 1 goes silent while rank 0 trains."""
    rank = LearnerRank(settings, place, PolicyVersion(0, 3))
    rank.train(payloads, rank.version)
    began = time.monotonic()
    if place.rank == 1:
        time.sleep(4 * settings.timeout_s)
        return "slept"
    try:
        rank.train(payloads, rank.version)
    except RuntimeError as error:
        waited = time.monotonic() - began
        assert waited < 3 * settings.timeout_s, waited
        return str(error)
    return "trained"


def test_a_silent_peer_is_an_error_within_the_time_limit(models: dict[str, str]) -> None:
    settings = settings_for(models["tied"], timeout_s=4.0)
    first, _ = run_ranks(silent_peer, 2, settings, made_up_payloads())
    assert "imed out" in first, first


def test_fewer_trajectories_than_ranks_are_refused_on_every_rank(models: dict[str, str]) -> None:
    results = run_ranks(too_few, 2, settings_for(models["tied"]))
    assert results == ["InputError: batch: 1 trajectories for 2 ranks"] * 2


def too_few(place: RankPlace, settings: LearnerSettings) -> str:
    rank = LearnerRank(settings, place, PolicyVersion(0, 3))
    group = made_up_groups(count=1)[0]
    alone = dataclasses.replace(
        group, trajectories=group.trajectories[:1], failures={DropReason.ENGINE_ERROR: 4}
    )
    try:
        rank.train([encode_group(alone)], rank.version)
    except (InputError, RunError) as error:
        return f"{type(error).__name__}: {error}"
    return "trained"
