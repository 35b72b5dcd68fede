"""Reading, merging, overriding, expanding and reporting: everything up to a typed Experiment."""
import copy
import pickle
from pathlib import Path

import pytest

from mrl.config.errors import ConfigError
from mrl.config.load import dump_experiment, load_experiment, load_sft

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
EXPERIMENTS = [path for path in CONFIGS if "sft" not in path.name]


def problems_of(path, overrides=()) -> dict:
    """Problems by key."""
    with pytest.raises(ConfigError) as caught:
        load_experiment(path, overrides)
    return {problem.key: problem for problem in caught.value.problems}


def test_values_and_defaults(experiment_file):
    exp = load_experiment(experiment_file)
    assert exp.trainer.parallel.tp == 2
    assert exp.trainer.parallel.pp == 1
    assert exp.algorithm.clip.high == 0.2
    assert (exp.trainer_ranks, exp.engine_count, exp.data_parallel) == (2, 1, 1)


def test_unknown_key_names_file_line_and_nearest(content, write):
    content["trainer"]["paralel"] = {"tp": 1}
    path = write(content)
    line = path.read_text().splitlines().index("  paralel:") + 1
    message = str(problems_of(path)["trainer.paralel"])
    assert f"{path}:{line}" in message or f"{path}:{line + 1}" in message
    assert "unknown key" in message and "did you mean trainer.parallel?" in message


def test_unknown_key_known_in_another_section(content, write):
    content["rollout"]["temperature"] = 0.7
    assert "did you mean rollout.sampling.temperature?" in str(problems_of(write(content))["rollout.temperature"])


@pytest.mark.parametrize("key, value, allowed", [
    ("loop.steps", "yes", "an integer > 0"),
    ("loop.steps", "'8'", "an integer > 0"),
    ("loop.steps", "0", "an integer > 0"),
    ("trainer.optimizer.lr", "fast", "a number > 0"),
    ("trainer.optimizer.lr", ".inf", "a number > 0"),
    ("trainer.optimizer.betas", "[0.9]", "a list of a number >= 0 and <= 1, a number >= 0 and <= 1"),
    ("rollout.port", "70000", "an integer >= 0 and <= 65535"),
    ("model.dtype", "float16", "one of float32, bfloat16"),
    ("data.shuffle", "1", "true or false"),
    ("rollout.args", "--x", "a list, each a string"),
    ("name", "a b", "a string matching"),
    ("batch", "3", "a mapping with the keys prompts_per_step (required)"),
])
def test_wrong_type_or_range(experiment_file, key, value, allowed):
    (problem,) = problems_of(experiment_file, [f"{key}={value}"]).values()
    assert problem.key.startswith(key)
    assert allowed in problem.allowed
    assert problem.origin == f"override '{key}={value}'"


def test_number_where_a_string_belongs_says_to_quote(content, write):
    content["trainer"]["env"] = {"OMP_NUM_THREADS": 1}
    assert 'trainer.env.OMP_NUM_THREADS: "1"' in problems_of(write(content))["trainer.env.OMP_NUM_THREADS"].remedy


def test_missing_key_and_section(content, write):
    del content["loop"], content["batch"]["prompts_per_step"]
    found = problems_of(write(content))
    assert set(found) == {"loop", "batch.prompts_per_step"}
    assert "required" in found["loop"].allowed and "prompts a step" in found["batch.prompts_per_step"].allowed


def test_all_violations_at_once(content, write):
    content["model"]["dtype"] = "float33"
    content["nam"] = "x"
    content["eval"] = {"datasets": {"a": {"path": "${env:MRL_TEST_UNSET}/heldout.jsonl"}}}
    del content["batch"]["samples_per_prompt"]
    found = problems_of(write(content), ["loop.steps=-1", "no-equals-sign", "rollout.args=["])
    assert set(found) == {"model.dtype", "nam", "eval.datasets.a.path", "batch.samples_per_prompt", "loop.steps",
                          "override", "rollout.args"}


def test_faults_inside_a_named_data_set(experiment_file):
    found = problems_of(experiment_file, [
        "eval.datasets.a.pth=x", "eval.datasets.a.sampling.temperatur=0", "eval.datasets.a.reward.proceses=2",
        "eval.datasets.b.samples_per_prompt=0", "eval.datasets.c=x"])
    assert "eval.datasets.a.path" in found and "held-out prompts" in found["eval.datasets.a.path"].allowed
    assert found["eval.datasets.a.pth"].remedy == "did you mean eval.datasets.a.path?"
    assert found["eval.datasets.a.sampling.temperatur"].remedy == "did you mean eval.datasets.a.sampling.temperature?"
    assert found["eval.datasets.a.reward.proceses"].remedy == "did you mean eval.datasets.a.reward.processes?"
    assert found["eval.datasets.b.samples_per_prompt"].allowed == "an integer > 0"
    assert "a mapping of names" in found["eval.datasets.c"].allowed


def test_names_of_data_sets_are_words(content, write):
    content["eval"] = {"datasets": {"a-b": {"path": "x"}}}
    assert "letters, digits, _" in problems_of(write(content))["eval.datasets.a-b"].allowed


def test_duplicate_key(write):
    problem = problems_of(write("name: a\nname: b\n"))["name"]
    assert "each key once" in problem.allowed and problem.origin.endswith(":2") and ":1" in problem.remedy


def test_yaml_syntax_error_has_file_and_line(write):
    path = write("name: a\nmodel: {path: ${env:X,y}}\n")
    (problem,) = problems_of(path).values()
    assert problem.allowed == "valid YAML" and problem.origin == f"{path}:2"


def test_no_such_file(folder):
    message = str(problems_of(folder / "nowhere.yaml")["experiment file"])
    assert "nowhere.yaml" in message and "No such file" in message


def test_not_a_mapping(write):
    assert "a mapping of sections" in str(problems_of(write("- 1\n"))["experiment file"])


def test_exponents_are_numbers_and_dates_are_strings(content, write):
    path = write(write(content).read_text() + "name: 2026-01-01\n")
    exp = load_experiment(path, ["trainer.optimizer.lr=5e-4", "trainer.optimizer.eps=1.5E-8"])
    assert (exp.trainer.optimizer.lr, exp.trainer.optimizer.eps, exp.name) == (5e-4, 1.5e-8, "2026-01-01")


def test_override_values_are_yaml_and_the_last_wins(experiment_file):
    exp = load_experiment(experiment_file, [
        "loop.steps=7", "loop.steps=9", "rollout.args=[--a, 'b=c']", "model.chat_template=null",
        "trainer.parallel={pp: 2}",
        "data.system_prompt=", "data.prompt_suffix='x=y'"])
    assert exp.loop.steps == 9
    assert exp.rollout.args == ["--a", "b=c"]
    assert exp.trainer.parallel.pp == 2 and exp.trainer.parallel.tp == 2  # a mapping merges
    assert exp.data.system_prompt is None and exp.data.prompt_suffix == "x=y"


def test_override_of_an_unknown_key(experiment_file):
    problem = problems_of(experiment_file, ["loop.step=3"])["loop.step"]
    assert "loop.steps" in problem.remedy and problem.origin == "override 'loop.step=3'"


def test_base_merges_mappings_and_replaces_lists(content, write):
    content["rollout"]["args"] = ["--one", "--two"]
    write(content, "shared/base.yaml")
    write({"base": "base.yaml", "loop": {"steps": 5}}, "shared/middle.yaml")
    exp = load_experiment(write({"base": "shared/middle.yaml", "rollout": {"args": ["--three"], "workers": 2}}))
    assert exp.loop.steps == 5
    assert exp.rollout.args == ["--three"] and exp.rollout.workers == 2
    assert exp.rollout.python == content["rollout"]["python"]


def test_problem_in_a_base_names_the_base_file(content, write):
    content["loop"]["steps"] = "many"
    base = write(content, "base.yaml")
    problem = problems_of(write({"base": "base.yaml"}))["loop.steps"]
    assert problem.origin.startswith(f"{base}:")


def test_base_cycle(write):
    write({"base": "b.yaml"}, "a.yaml")
    path = write({"base": "a.yaml"}, "b.yaml")
    assert "circle" in str(problems_of(path)["base"])


def test_missing_base_names_both_files(write):
    path = write({"base": "gone.yaml"})
    problem = problems_of(path)["base"]
    assert problem.origin == str(path) and "gone.yaml" in problem.value


def test_environment_is_expanded_only_where_marked(content, write, monkeypatch):
    monkeypatch.setenv("MRL_TEST_STEPS", "11")
    content["loop"]["steps"] = "STEPS"
    content["data"]["system_prompt"] = "$MRL_TEST_STEPS ${MRL_TEST_STEPS}"
    content["data"]["prompt_suffix"] = "SUFFIX"
    text = write(content).read_text().replace("steps: STEPS", "steps: ${env:MRL_TEST_STEPS}")
    text = text.replace("prompt_suffix: SUFFIX", 'prompt_suffix: "${env:MRL_TEST_STEPS}"')
    exp = load_experiment(write(text), ["rollout.workers=${env:MRL_TEST_NONE,3}"])
    assert exp.loop.steps == 11  # plain: typed after the expansion
    assert exp.data.prompt_suffix == "11"  # quoted: a string
    assert exp.data.system_prompt == "$MRL_TEST_STEPS ${MRL_TEST_STEPS}"
    assert exp.rollout.workers == 3


def test_an_unset_variable_does_not_matter_where_the_value_is_replaced(write, content):
    content["rollout"]["python"] = "${env:MRL_TEST_NONE}"
    path = write(content)
    assert set(problems_of(path)) == {"rollout.python"}
    assert load_experiment(path, ["rollout.python=python3"]).rollout.python == "python3"
    assert set(problems_of(path, ["rollout.workers=2"])) == {"rollout.python"}


def test_environment_variable_that_is_not_set(experiment_file):
    problem = problems_of(experiment_file, ["name=${env:MRL_TEST_NONE}"])["name"]
    assert "MRL_TEST_NONE" in problem.allowed and "${env:MRL_TEST_NONE,default}" in problem.remedy


def test_malformed_reference(experiment_file):
    assert "${env:NAME,default}" in problems_of(experiment_file, ["name=${env:1}"])["name"].allowed


def test_relative_paths_start_at_the_current_directory(content, write, folder, monkeypatch):
    (folder / "here").mkdir()
    monkeypatch.chdir(folder / "here")
    monkeypatch.setenv("HOME", str(folder / "home"))
    content["model"] |= {"path": "../model", "chat_template": "chat.jinja"}
    content["data"] |= {"train": "hf:owner/name"}
    content["eval"] = {"datasets": {
        "a": {"path": "~/heldout.jsonl", "reward": {"kind": "custom", "function": "mine.py:other"}},
        "b": {"path": "hf:owner/other"}}}
    content["reward"] = {"kind": "custom", "function": "mine.py:score"}
    content["rollout"]["python"] = "python3"
    exp = load_experiment(write(content, "elsewhere/experiment.yaml"))
    assert exp.model.path == str(folder / "model")
    assert exp.model.chat_template == str(folder / "here" / "chat.jinja")
    assert exp.data.train == "hf:owner/name"
    assert exp.eval.datasets["a"].path == str(folder / "home" / "heldout.jsonl")
    assert exp.eval.datasets["a"].reward.parts["custom"].function == f"{folder}/here/mine.py:other"
    assert exp.eval.datasets["b"].path == "hf:owner/other" and exp.eval.datasets["b"].reward is None
    assert exp.reward.parts["custom"].function == f"{folder}/here/mine.py:score"
    assert exp.rollout.python == "python3"  # looked up on PATH
    assert exp.log.dir == str(folder / "here" / "runs")


def test_hub_ids_stay_unless_a_directory_has_that_name(experiment_file, folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert load_experiment(experiment_file, ["model.path=owner/name"]).model.path == "owner/name"
    (folder / "owner" / "name").mkdir(parents=True)
    assert load_experiment(experiment_file, ["model.path=owner/name"]).model.path == str(folder / "owner" / "name")


def test_symbolic_link_of_a_python_is_kept(experiment_file, folder, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / "venv").mkdir()
    (folder / "venv" / "python").symlink_to(folder / "python")
    exp = load_experiment(experiment_file, ["rollout.python=venv/python"])
    assert exp.rollout.python == str(folder / "venv" / "python")


def test_resolved_file_reloads_to_an_equal_experiment(experiment_file, folder, monkeypatch):
    exp = load_experiment(experiment_file, ["trainer.optimizer.lr=1e-6", "algorithm.clip.high=0.28",
                                            "data.prompt_suffix='\\n: # \"é\"'", "trainer.env.A='1'"])
    dump_experiment(exp, folder / "resolved.yaml")
    (folder / "other").mkdir()
    monkeypatch.chdir(folder / "other")  # the resolved file no longer depends on where it is read
    assert load_experiment(folder / "resolved.yaml") == exp


def test_error_survives_pickling(experiment_file):
    with pytest.raises(ConfigError) as caught:
        load_experiment(experiment_file, ["loop.steps=0"])
    copied = pickle.loads(pickle.dumps(caught.value))
    assert str(copied) == str(caught.value) and copied.problems == caught.value.problems
    assert str(copy.copy(ConfigError("one sentence"))) == "one sentence"


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.name)
def test_shipped_configs_load(path, monkeypatch):
    monkeypatch.setenv("MRL_HOME", "/home/of/mrl")
    for engine in ("vllm", "sglang"):
        monkeypatch.setenv(f"MRL_{engine.upper()}_PYTHON", f"/gpu/{engine}/bin/python")
    exp = load_experiment(path)
    assert exp.model.path.startswith("/home/of/mrl/")
    home = "/gpu" if exp.cluster.device == "cuda" else "/home/of/mrl"
    assert exp.rollout.python == f"{home}/{exp.rollout.engine}/bin/python"


def test_supervised_file(monkeypatch):
    monkeypatch.setenv("MRL_HOME", "/home/of/mrl")
    exp = load_sft(CONFIGS[0].parent / "quickstart_sft.yaml", ["steps=5"])
    assert exp.steps == 5 and exp.trainer.parallel.tp == 2
    assert (exp.model.path, exp.out) == ("/home/of/mrl/quickstart/init", "/home/of/mrl/quickstart/model")
    with pytest.raises(ConfigError, match="did you mean steps"):
        load_sft(CONFIGS[0].parent / "quickstart_sft.yaml", ["step=5"])
