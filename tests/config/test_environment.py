"""`mrl check --environment`."""
import importlib.metadata
import sys

from mrl import environment
from mrl.config.load import load_experiment
from tests.config.test_cli import row


def test_what_is_installed_is_named_with_its_version(invoke):
    result = invoke("check", "--environment")
    assert result.exit_code == 0, result.output
    for package in ("torch", "megatron-core", "ray"):
        assert row(result.output, package)[1] == importlib.metadata.version(package)
    assert "apex" in result.output and "transformer-engin" in result.output and "flash-attn" in result.output


def test_what_is_missing_says_what_happens_without_it(monkeypatch):
    missing = environment.Component("no-such-package", "no_such_package.inner", "wings", "walking")
    monkeypatch.setattr(environment, "COMPONENTS", (missing,))
    assert environment.trainer_rows()[-1] == ("no-such-package", "not found", "wings", "walking")


def test_a_module_without_metadata_is_found(monkeypatch):
    monkeypatch.setattr(environment, "COMPONENTS", (environment.Component("no-such-package", "json", "", ""),))
    assert environment.trainer_rows()[-1][1] == "installed, version unknown"


def test_the_engine_of_an_experiment_is_looked_for(experiment_file):
    exp = load_experiment(experiment_file, ["rollout.python=/nowhere/python"])
    [(name, found, where, buys, remedy)] = environment.engine_rows(exp)
    assert (name, found) == ("vllm", "not found") and "/nowhere/python" in where and "no such file" in remedy
    exp = load_experiment(experiment_file, [f"rollout.python={sys.executable}"])
    assert "this Python has no vllm" in environment.engine_rows(exp)[0][-1] and "0.26.0" in buys


def test_without_an_experiment_all_engines_are_looked_for(monkeypatch, tmp_path):
    monkeypatch.setenv("MRL_HOME", str(tmp_path))
    monkeypatch.setenv("MRL_SGLANG_PYTHON", sys.executable)
    monkeypatch.delenv("MRL_VLLM_PYTHON", raising=False)
    python = tmp_path / "vllm" / "bin" / "python"
    package = tmp_path / "vllm" / "bin" / "vllm"  # beside the interpreter, where it looks first
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    python.symlink_to(sys.executable)
    vllm, sglang = environment.engine_rows(None)
    assert vllm[1:3] == ("version unknown", f"rollout.python: {python}") and "not tested" in vllm[-1]
    assert sglang[1:3] == ("not found", f"rollout.python: {sys.executable}") and "no sglang" in sglang[-1]
