"""Which models can be started from, and what is said of the others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster.config import parse_config
from cluster.model_source import find_model
from correction.errors import ConfigError


def model_of(folder: Path, **description: object) -> Path | None:
    (folder / "config.json").write_text(json.dumps(description))
    return find_model(parse_config({"model": {"path": str(folder)}}))


def test_the_starter_is_made_not_found() -> None:
    assert find_model(parse_config({})) is None


def test_a_causal_model_folder_is_taken(tmp_path: Path) -> None:
    assert model_of(tmp_path, architectures=["Qwen3ForCausalLM"]) == tmp_path


@pytest.mark.parametrize(
    ("description", "reason"),
    [
        ({"architectures": ["BertModel"]}, "causal"),
        ({}, "causal"),
        (
            {"architectures": ["Qwen3ForCausalLM"], "quantization_config": {"bits": 4}},
            "head cannot be swapped",
        ),
    ],
)
def test_models_that_cannot_be_swapped_are_refused(
    tmp_path: Path, description: dict[str, object], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        model_of(tmp_path, **description)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no readable config\.json"):
        find_model(parse_config({"model": {"path": str(tmp_path)}}))


def test_an_unknown_id_is_refused_without_a_download() -> None:
    with pytest.raises(ConfigError, match="neither a folder nor a transformers id"):
        find_model(parse_config({"model": {"path": "nobody/nothing"}}))
