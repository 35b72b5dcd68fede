"""The `reward` section: its two forms, its kinds, and what is said about mistakes in it."""
import pytest

from mrl.config.errors import ConfigError
from mrl.config.load import dump_experiment, load_experiment
from mrl.config.reward_checks import check_reward
from mrl.config.rewards import KINDS
from mrl.config.schema import Reward


def messages(reward: dict) -> dict[str, str]:
    found = check_reward("reward", Reward.model_validate(reward))
    return {problem.key: f"{problem.allowed} {problem.remedy}" for problem in found}


@pytest.mark.parametrize("kind, needed", [
    *[(kind, {}) for kind in ("math", "gsm8k", "multiple_choice", "exact", "code", "rouge", "format", "reasoning_gym")],
    ("length", {"full": 10, "zero": 20}), ("custom", {"function": "f.py:score"}), ("http", {"url": "http://host:1/x"}),
    ("model", {"url": "http://host:1", "model": "judge", "api": "chat"})])
def test_every_kind_as_the_only_part_and_as_one_of_several(kind, needed):
    short = Reward.model_validate({"kind": kind, **needed, "weight": 0.5, "processes": 2})
    long = Reward.model_validate({"parts": {kind: {"kind": kind, **needed, "weight": 0.5}}, "processes": 2})
    assert short == long and type(short.parts[kind]) is KINDS[kind] and not list(check_reward("reward", short))


def test_all_kinds_are_tested_above():
    assert len(KINDS) == 12


def test_parts_of_a_base_file_merge_by_name(content, write):
    content["reward"] = {"parts": {"right": {"kind": "exact"}, "short": {"kind": "length", "full": 1, "zero": 9}}}
    exp = load_experiment(write(content), ["reward.parts.short.weight=-0.5"])
    assert [part.weight for part in exp.reward.parts.values()] == [1.0, -0.5]


def test_the_resolved_file_keeps_every_part(content, write, folder):
    content["reward"] = {"kind": "custom", "function": "mine.py:score", "timeout_s": 3.0}
    exp = load_experiment(write(content))
    dump_experiment(exp, folder / "resolved.yaml")
    assert load_experiment(folder / "resolved.yaml").reward == exp.reward


@pytest.mark.parametrize("overrides, key, words", [
    (["reward.kind=exact", "reward.parts.more.kind=math"], "reward", "remove one of the two"),
    (["reward.kind=exakt"], "reward.kind", "did you mean exact?"),
    (["reward.kind=null", "reward.kinds=math"], "reward.kinds", "did you mean reward.kind?"),
    (["reward.kind=null", "reward.parts.a.kind=maths"], "reward.parts.a.kind", "did you mean math?"),
    (["reward.kind=exact", "reward.ignore_csae=true"], "reward.ignore_csae", "did you mean reward.ignore_case?"),
    (["reward.kind=custom"], "reward.function", "required; a string"),
    (["reward.kind=math", "reward.percent=never"], "reward.percent", "one of optional, value"),
    (["reward.kind=math", "reward.timeout_s=0"], "reward.timeout_s", "a number > 0"),
    (["reward.kind=http", "reward.url=host"], "reward.url", "https?://"),
])
def test_mistakes_are_named_as_written(content, write, overrides, key, words):
    with pytest.raises(ConfigError) as caught:
        load_experiment(write(content), overrides)
    [problem] = caught.value.problems
    assert problem.key == key and words in str(problem)


@pytest.mark.parametrize("part, key, words", [
    ({"kind": "length", "full": 10, "zero": 20, "unit": "words"}, "reward.parts.p.unit", "one of tokens, characters"),
    ({"kind": "length", "full": 10}, "reward.parts.p.zero", "required; an integer"),
    ({"kind": "length", "full": 10, "zero": 20, "weigth": 1}, "reward.parts.p.weigth",
     "did you mean reward.parts.p.weight?"),
    ({"weight": 1}, "reward.parts.p.kind", "required; one of math, "),
])
def test_mistakes_inside_a_named_part(content, write, part, key, words):
    content["reward"] = {"parts": {"right": {"kind": "exact"}, "p": part}}
    with pytest.raises(ConfigError) as caught:
        load_experiment(write(content))
    [problem] = caught.value.problems
    assert problem.key == key and words in str(problem)


@pytest.mark.parametrize("part, key, words", [
    ({"kind": "custom", "function": "mine.py"}, "function", "path.py:function"),
    ({"kind": "custom", "function": "mine.py:no name"}, "function", "path.py:function"),
    ({"kind": "length", "full": 3, "zero": 3}, "zero", "another length"),
    ({"kind": "code", "timeout_s": 1.0}, "test_timeout_s", "raise timeout_s"),
    ({"kind": "format", "pattern": "("}, "pattern", "unterminated"),
    ({"kind": "model", "url": "http://h", "model": "m", "api": "chat", "verdict": "x"}, "verdict", "1 group, not 0"),
    ({"kind": "model", "url": "http://h", "model": "m", "api": "chat", "lowest": 10.0}, "lowest", "less than"),
    ({"kind": "model", "url": "http://h", "model": "m", "api": "sglang_classify"}, "tokenizer", "chat template"),
    ({"kind": "model", "url": "http://h", "model": "m", "api": "vllm_pooling", "tokenizer": "t"}, "tokenizer", "null"),
    ({"kind": "model", "url": "http://h", "model": "m", "api": "vllm_pooling", "instruction": "t"}, "instruction",
     "set api: chat"),
])
def test_keys_of_a_part_against_each_other(part, key, words):
    found = messages({"parts": {"p": part}})
    assert list(found) == [f"reward.parts.p.{key}"] and words in found[f"reward.parts.p.{key}"]


@pytest.mark.parametrize("name", ["mean", "errors", "a b", "a/b", "a.b"])
def test_names_of_parts_are_names_of_metrics(name):
    assert list(messages({"parts": {name: {"kind": "exact"}}})) == [f"reward.parts.{name}"]


def test_weights_that_are_all_zero_train_nothing():
    assert list(messages({"kind": "exact", "weight": 0.0})) == ["reward.parts"]


RIGHT, FORM, SHORT = {"kind": "math"}, {"kind": "format", "weight": 0.2}, {"kind": "length", "full": 1, "zero": 9}


@pytest.mark.parametrize("reward, judging", [
    ({"kind": "rouge", "weight": 0.5}, ["rouge"]),
    ({"parts": {"short": {**SHORT, "weight": -1.0}}}, ["short"]),
    ({"parts": {"form": FORM, "right": RIGHT, "short": SHORT}}, ["right"]),
    ({"parts": {"form": FORM, "mine": {"kind": "custom", "function": "f.py:score"}}}, ["form", "mine"]),
    ({"parts": {"right": {**RIGHT, "weight": 0.0}, "form": FORM, "short": {**SHORT, "weight": -1.0}}}, ["form"]),
    ({"parts": {"form": FORM, "right": RIGHT}, "accuracy": {"parts": ["form"]}}, ["form"]),
])
def test_which_parts_say_whether_a_response_is_right(reward, judging):
    assert Reward.model_validate(reward).judging == judging


def test_a_part_that_judges_must_exist():
    found = messages({"parts": {"form": FORM, "right": RIGHT}, "accuracy": {"parts": ["right", "from"]}})
    assert found == {"reward.accuracy.parts.1": "a name in reward.parts: form, right correct it, or remove the key"}
