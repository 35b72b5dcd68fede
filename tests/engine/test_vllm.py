"""How a vLLM server is started: command, environment, and what is refused before anything starts."""
import stat
import sys

import pytest

from mrl.engine.api import EngineStartError
from mrl.engine.vllm import command_line, environment, require_vllm
from tests.rollout.experiments import experiment


def test_python_without_vllm_names_the_key():
    with pytest.raises(EngineStartError, match=r"rollout.python='.*' has no vLLM \(no module vllm\); install"):
        require_vllm(sys.executable)


@pytest.mark.parametrize("make", [lambda path: None, lambda path: path.write_text("not a program")])
def test_python_that_cannot_run_names_the_key(tmp_path, make):
    path = tmp_path / "python"
    if make(path) is not None:
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    with pytest.raises(EngineStartError, match="rollout.python='.*' cannot be run"):
        require_vllm(str(path))


def value_of(command: list[str], flag: str) -> str:
    return command[command.index(flag) + 1]


def test_command_line(tmp_path):
    config = experiment(model={"path": str(tmp_path), "dtype": "bfloat16"},
                        data={"train": "-", "max_prompt_tokens": 100},
                        rollout={"python": "py", "parallel": {"tp": 2}, "sampling": {"max_response_tokens": 28},
                                 "args": ["--max-num-seqs", "7"]})
    command = command_line(config, 1, 1234, load_weights=False, on_cpu=True)
    assert value_of(command, "--max-model-len") == "128"
    assert value_of(command, "--tensor-parallel-size") == "2"
    assert value_of(command, "--load-format") == "dummy"
    assert value_of(command, "--logprobs-mode") == "processed_logprobs"
    assert "--enforce-eager" in command and command[-2:] == ["--max-num-seqs", "7"]
    on_gpu = command_line(config, 1, 1234, load_weights=True, on_cpu=False)
    assert "--enforce-eager" not in on_gpu and value_of(on_gpu, "--load-format") == "auto"


def test_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("PYTHONPATH", "/inherited")
    config = experiment(model={"path": str(tmp_path)}, rollout={"python": "py", "env": {"OMP_NUM_THREADS": "2"}})
    env = environment(config, 1, "run", 4, gpus=[])
    assert "RANK" not in env and env["OMP_NUM_THREADS"] == "2" and env["CUDA_VISIBLE_DEVICES"] == ""
    receiver, rest = env["PYTHONPATH"].split(":", 1)
    assert receiver.endswith("receiver") and rest == "/inherited"
    assert (env["MRL_RUN_ID"], env["MRL_ENGINE"], env["MRL_INCARNATION"]) == ("run", "1", "4")
    assert env["HF_HUB_OFFLINE"] == "1"
    assert environment(config, 0, "run", 1, gpus=[2, 3])["CUDA_VISIBLE_DEVICES"] == "2,3"
