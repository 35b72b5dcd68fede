"""A complete, valid experiment on disk, with a stand-in for the Python that holds the engines."""
import json
import os
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from mrl.cli import app
from mrl.engine.versions import TESTED

HF_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 4, "hidden_size": 48,
    "intermediate_size": 112, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 70,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "max_position_embeddings": 256,
}


@pytest.fixture
def hf_config() -> dict:
    return dict(HF_CONFIG)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """model/, train.jsonl, heldout.jsonl and an engine Python."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(HF_CONFIG))
    (model / "model.safetensors").touch()
    (model / "tokenizer.json").write_text("{}")
    for name in ("train", "heldout"):
        (tmp_path / f"{name}.jsonl").write_text('{"prompt": "1+1=?", "answer": "2"}\n')
    python = tmp_path / "python"
    # Packages with the engines' names that this Python finds: enough for the probe, which must not import them.
    for engine, (*_, version) in TESTED.items():
        package, about = tmp_path / "site" / engine, tmp_path / "site" / f"{engine}-{version}.dist-info"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("raise RuntimeError('the probe must not import it')")
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {engine}\nVersion: {version}\n")
    python.write_text(f"#!/bin/sh\nPYTHONPATH={tmp_path}/site exec {sys.executable} \"$@\"\n")
    python.chmod(0o755)
    return tmp_path


@pytest.fixture
def content(folder: Path) -> dict:
    """The valid experiment as a plain mapping; tests change a copy of it."""
    return {
        "model": {"path": str(folder / "model"), "dtype": "float32"},
        "data": {"train": str(folder / "train.jsonl"), "max_prompt_tokens": 16},
        "reward": {"kind": "exact"},
        "batch": {"prompts_per_step": 8, "samples_per_prompt": 4, "max_tokens_per_microbatch": 128},
        "trainer": {"parallel": {"tp": 2}},
        "rollout": {"python": str(folder / "python"), "sampling": {"max_response_tokens": 16}},
        "loop": {"steps": 4},
        "cluster": {"device": "cpu", "trainer_gpus": 2, "rollout_gpus": 1},
    }


@pytest.fixture
def write(folder: Path):
    """Writes text or a mapping as a file of the folder and returns its path."""
    def _write(content: dict | str, name: str = "experiment.yaml") -> Path:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else yaml.safe_dump(content, sort_keys=False))
        return path
    return _write


@pytest.fixture
def experiment_file(content: dict, write) -> Path:
    return write(content)


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch):
    for name in list(os.environ):
        if name.startswith("MRL_"):
            monkeypatch.delenv(name)


@pytest.fixture
def invoke(monkeypatch):
    """Runs `mrl` with arguments on a wide terminal."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "dumb")
    return lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments])
