"""What must exist on this machine: files, the engine's Python, GPUs."""
import pytest

from mrl import preflight as module
from mrl.config.load import load_experiment
from mrl.engine.versions import TESTED
from mrl.preflight import count_gpus, preflight_evaluation, preflight_plan, preflight_training, visible_devices


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def found(experiment_file, *overrides, preflight=preflight_training) -> dict:
    problems, _ = preflight(load_experiment(experiment_file, overrides))
    return {problem.key: str(problem) for problem in problems}


def test_nothing_wrong(experiment_file, hf_config):
    exp = load_experiment(experiment_file)
    assert preflight_training(exp) == preflight_plan(exp, None) == ([], hf_config)


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
    problems = found(experiment_file, "model.path=owner/name", "trainer.parallel.pp=3", "cluster.trainer_gpus=6")
    assert "num_hidden_layers 4" in problems["trainer.parallel.pp"]


@pytest.mark.parametrize("key", ["data.train", "eval.datasets.heldout.path"])
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
    text = found(experiment_file, "reward.kind=custom", f"reward.function={folder}/mine.py:score")[
        "reward.parts.custom.function"]
    assert f"no such file: {folder}/mine.py" in text


def test_no_engine_python(experiment_file, folder):
    assert "no such file or command" in found(experiment_file, f"rollout.python={folder}/nopython")["rollout.python"]


def test_engine_python_that_is_not_executable(experiment_file, folder):
    (folder / "python").chmod(0o644)
    assert "not executable" in found(experiment_file)["rollout.python"]


@pytest.mark.parametrize("engine", sorted(TESTED))
def test_engine_python_without_the_engine(experiment_file, folder, engine):
    assert found(experiment_file, f"rollout.engine={engine}") == {}
    (folder / "site" / engine).rename(folder / "site" / "renamed")
    assert f"has no {engine}: install it there" in found(experiment_file, f"rollout.engine={engine}")["rollout.python"]


def test_engine_python_that_fails(experiment_file, folder):
    (folder / "python").write_text("#!/bin/sh\necho broken interpreter >&2; exit 1\n")
    assert "broken interpreter" in found(experiment_file)["rollout.python"]


def test_the_directory_for_weights_must_be_writable(experiment_file, folder):
    disk = ["sync.transport=disk", f"sync.disk_dir={folder}/shared"]
    assert "an existing directory" in found(experiment_file, *disk)["sync.disk_dir"]
    (folder / "shared").mkdir()
    assert found(experiment_file, *disk) == {}


def test_a_plan_needs_no_engine(experiment_file):
    exp = load_experiment(experiment_file, ["rollout.python=nopython-anywhere"])
    assert preflight_plan(exp, None)[0] == []


def test_hub_data_needs_its_library(experiment_file, monkeypatch):
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    assert "-m pip install datasets" in found(experiment_file, "data.train=hf:owner/name")["data.train"]
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: name)
    assert found(experiment_file, "data.train=hf:owner/name") == {}


def test_evaluation_looks_at_what_it_uses(experiment_file, folder):
    training_only = ["data.train=gone.jsonl", "trainer.parallel.tp=3", "batch.minibatches=5",
                     "cluster.trainer_gpus=null", "rollout.sampling.top_k=20",
                     f"eval.datasets.heldout.path={folder}/heldout.jsonl"]
    assert found(experiment_file, *training_only, preflight=preflight_evaluation) == {}
    problems = found(experiment_file, "rollout.python=nopython-anywhere", "rollout.parallel.tp=2",
                     "reward.kind=custom", "reward.function=mine", preflight=preflight_evaluation)
    assert set(problems) == {"eval.datasets", "rollout.python", "cluster.rollout_gpus",
                             "reward.parts.custom.function"}
    assert "held-out data set" in problems["eval.datasets"]


def test_evaluation_counts_the_engines_gpus_alone(experiment_file, folder, monkeypatch):
    cuda = ["cluster.device=cuda", "cluster.trainer_gpus=8", "cluster.rollout_gpus=2",
            f"eval.datasets.heldout.path={folder}/heldout.jsonl"]
    monkeypatch.setattr(module, "count_gpus", lambda: 2)
    assert found(experiment_file, *cuda, preflight=preflight_evaluation) == {}
    monkeypatch.setattr(module, "count_gpus", lambda: 1)
    text = found(experiment_file, *cuda, preflight=preflight_evaluation)["cluster.rollout_gpus"]
    assert "need 2, 1 are visible" in text


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


@pytest.mark.parametrize("text, names", [
    ("", []), ("2,3", ["2", "3"]), (" 1 , GPU-a", ["1", "GPU-a"]), ("3,-1,2", ["3"])])
def test_visible_devices(monkeypatch, text, names):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", text)
    assert visible_devices() == names
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert visible_devices() is None


def test_no_gpus_without_a_driver(monkeypatch):
    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    assert count_gpus() == 0
