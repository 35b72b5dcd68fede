"""What must exist on this machine: files, the engine's Python, GPUs."""
import pytest

from mrl import preflight as module
from mrl.config.load import load_experiment
from mrl.preflight import count_gpus, preflight


def found(experiment_file, *overrides) -> dict:
    problems, _ = preflight(load_experiment(experiment_file, overrides), visible_gpus=0)
    return {problem.key: str(problem) for problem in problems}


def test_nothing_wrong(experiment_file, hf_config):
    problems, config = preflight(load_experiment(experiment_file), visible_gpus=0)
    assert problems == [] and config == hf_config


def test_no_model_directory(experiment_file, folder):
    assert "no such directory" in found(experiment_file, f"model.path={folder}/nowhere")["model.path"]


def test_model_directory_without_config(experiment_file, folder):
    (folder / "model" / "config.json").unlink()
    assert "config.json" in found(experiment_file)["model.path"]


def test_model_config_that_is_no_json(experiment_file, folder):
    (folder / "model" / "config.json").write_text("{")
    assert "not valid JSON" in found(experiment_file)["model.path"]


def test_model_directory_without_weights(experiment_file, folder):
    (folder / "model" / "model.safetensors").unlink()
    assert "model directory without weights" in found(experiment_file)["model.path"]


def test_model_directory_without_tokenizer(experiment_file, folder):
    (folder / "model" / "tokenizer.json").unlink()
    assert "tokenizer.json" in found(experiment_file)["model.path"]


def test_unknown_model_name(experiment_file, monkeypatch):
    def gone(*_):
        raise OSError("401 Repository Not Found")
    monkeypatch.setattr("huggingface_hub.hf_hub_download", gone)
    text = found(experiment_file, "model.path=owner/name")["model.path"]
    assert "no directory of that name here" in text and "401 Repository Not Found" in text


def test_hub_model_reads_its_downloaded_config(experiment_file, folder, monkeypatch):
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda name, file: str(folder / "model" / file))
    assert found(experiment_file, "model.path=owner/name") == {}
    assert "layers (4)" in found(experiment_file, "model.path=owner/name", "trainer.parallel.pp=3",
                                 "cluster.trainer_gpus=6")["trainer.parallel.pp"]


@pytest.mark.parametrize("key", ["data.train", "data.eval"])
def test_missing_data_file(experiment_file, folder, key):
    text = found(experiment_file, f"{key}={folder}/gone.jsonl")[key]
    assert f"{folder}/gone.jsonl" in text and "does not exist" in text


def test_data_file_of_another_kind(experiment_file, folder):
    (folder / "train.csv").touch()
    assert "unknown ending '.csv'" in found(experiment_file, f"data.train={folder}/train.csv")["data.train"]


def test_empty_data_file(experiment_file, folder):
    (folder / "train.jsonl").write_text("")
    assert "no rows" in found(experiment_file)["data.train"]


def test_malformed_line_is_named(experiment_file, folder):
    with open(folder / "train.jsonl", "a") as file:
        file.write('{"prompt": "1+2=?"\n')
    assert f"{folder}/train.jsonl, line 2" in found(experiment_file)["data.train"]


def test_missing_chat_template(experiment_file, folder):
    assert "no such file" in found(experiment_file, f"model.chat_template={folder}/chat.jinja")["model.chat_template"]


def test_missing_reward_file(experiment_file, folder):
    text = found(experiment_file, "reward.kind=custom", f"reward.function={folder}/mine.py:score")["reward.function"]
    assert f"no such file: {folder}/mine.py" in text


def test_no_engine_python(experiment_file, folder):
    assert "no such file or command" in found(experiment_file, f"rollout.python={folder}/nopython")["rollout.python"]


def test_engine_python_that_is_not_executable(experiment_file, folder):
    (folder / "python").chmod(0o644)
    assert "not executable" in found(experiment_file)["rollout.python"]


def test_engine_python_without_vllm(experiment_file, folder):
    (folder / "site" / "vllm").rename(folder / "site" / "renamed")
    assert "has no vllm" in found(experiment_file)["rollout.python"]


def test_engine_python_that_fails(experiment_file, folder):
    (folder / "python").write_text("#!/bin/sh\necho broken interpreter >&2; exit 1\n")
    assert "broken interpreter" in found(experiment_file)["rollout.python"]


def test_files_and_settings_are_reported_together(experiment_file, folder):
    (folder / "model" / "config.json").unlink()
    keys = set(found(experiment_file, f"data.train={folder}/gone.jsonl", "rollout.python=nopython-anywhere",
                     "batch.minibatches=3"))
    assert keys == {"model.path", "data.train", "rollout.python", "batch.minibatches"}


@pytest.mark.parametrize("visible, count", [
    (None, 2), ("", 0), ("1", 1), ("0,1", 2), ("0,-1,1", 1), ("GPU-a,GPU-b", 2)])
def test_count_gpus(folder, monkeypatch, visible, count):
    listing = folder / "nvidia-smi"
    listing.write_text("#!/bin/sh\necho 'GPU 0: H (UUID: GPU-a)'\necho 'GPU 1: H (UUID: GPU-b)'\n")
    listing.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert count_gpus() == count


def test_no_gpus_without_a_driver(monkeypatch):
    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    assert count_gpus() == 0
