"""SmolLM2 from the PyPI package: a folder that transformers loads and a chat that is carried."""

import json
from pathlib import Path

import pytest

from actors.environments.reasoning_gym import ReasoningGymFamily
from actors.renderer import ChatRenderer, make_renderer
from correction.errors import ConfigError
from learner import smollm2

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # gguf's and llama's own


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return smollm2.convert(tmp_path_factory.mktemp("models") / "deep" / "smollm2")


@pytest.mark.stack
def test_the_folder_is_bf16_tied_and_answers(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    renderer = make_renderer(folder, ReasoningGymFamily.__new__(ReasoningGymFamily))
    assert isinstance(renderer, ChatRenderer)
    prompt = renderer.prompt_ids("What is the capital of France?")
    out = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)
    assert "Paris" in renderer.action_text(out[0, len(prompt) :].tolist())


@pytest.mark.stack
def test_a_second_conversion_changes_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "packaged_gguf", lambda: pytest.fail("converted again"))
    assert smollm2.convert(folder) == folder
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_a_conversion_that_dies_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(source: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(smollm2, "packaged_gguf", lambda: Path("some.gguf"))
    monkeypatch.setattr(smollm2, "_write", dies)
    with pytest.raises(KeyboardInterrupt):
        smollm2.convert(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_what_stands_in_the_way_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")
    with pytest.raises(ConfigError, match="is no model folder"):
        smollm2.convert(tmp_path)
    assert (tmp_path / "precious").read_text() == "x"


def test_without_the_package_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(smollm2, "PACKAGE", "not_installed_here")
    assert smollm2.main([str(tmp_path / "model")]) == 2
    assert "extra 'smollm2'" in capsys.readouterr().err
    assert smollm2.main([]) == 2
