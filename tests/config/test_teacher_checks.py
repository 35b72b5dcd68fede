"""What is wrong between a teacher and the rest of the experiment."""
import json

import pytest

from mrl.cluster.placement import assign
from mrl.config.checks import check_experiment
from mrl.config.load import load_experiment
from mrl.config.resume import resume_problems
from mrl.engine.teacher import teacher_experiment
from mrl.preflight import preflight_plan

DISTILL = ["algorithm.name=distill", "cluster.teacher_gpus=2"]


@pytest.fixture
def with_teacher(experiment_file, folder):
    """The experiment with a teacher and overrides."""
    def load(*overrides):
        return load_experiment(experiment_file, [*DISTILL, f"teacher.path={folder}/model", "teacher.dtype=float32",
                                                 f"teacher.python={folder}/python", *overrides])
    return load


def test_a_teacher_that_fits(with_teacher, hf_config):
    assert check_experiment(with_teacher("batch.samples_per_prompt=1"), hf_config, 0) == []


@pytest.mark.parametrize("overrides, key, words", [
    (["algorithm.name=grpo"], "teacher", "which asks no teacher"),
    (["teacher=null", "cluster.teacher_gpus=null"], "teacher", "a teacher's log-probs are what is learnt"),
    (["cluster.teacher_gpus=null"], "cluster.teacher_gpus", "an integer > 0"),
    (["teacher.parallel.tp=4"], "cluster.teacher_gpus", "a multiple of teacher.parallel.tp (4)"),
    (["rollout.sampling.temperature=0.7"], "rollout.sampling.temperature", "at temperature 1"),
    (["algorithm.kl={coef: 0.1, place: reward}"], "algorithm.kl.place", "loss"),
    (["teacher.args=[--model=x]"], "teacher.args.0", "it comes from model.path"),
    (["algorithm.std=none"], "algorithm.std", "algorithm.name distill"),
])
def test_faults(with_teacher, hf_config, overrides, key, words):
    problem, = check_experiment(with_teacher(*overrides), hf_config, 0)
    assert problem.key == key and words in str(problem)


@pytest.mark.parametrize("changes, words", [
    (dict(max_position_embeddings=33), None),
    (dict(max_position_embeddings=32),
     "33 positions, data.max_prompt_tokens (16) + rollout.sampling.max_response_tokens (16) + 1 for what its engine "
     "must produce to answer; this one reaches 32"),
    (dict(vocab_size=69), "model.path has 70 rows of output, this one embeds 69"),
    (dict(text_config={"max_position_embeddings": 8, "vocab_size": 70}), "reaches 8"),
])
def test_a_teacher_must_hold_the_students_samples(with_teacher, hf_config, changes, words):
    found = check_experiment(with_teacher(), hf_config, 0, None, {**hf_config, **changes})
    assert [(problem.key, words in str(problem)) for problem in found] == ([("teacher.path", True)] if words else [])


def test_the_teachers_config_is_read_before_a_run(with_teacher, folder, hf_config):
    (folder / "teacher").mkdir()
    (folder / "teacher" / "config.json").write_text(json.dumps({**hf_config, "max_position_embeddings": 20}))
    found, _ = preflight_plan(with_teacher(f"teacher.path={folder}/teacher"), None)
    assert [problem.key for problem in found] == ["teacher.path"] * 3  # no weights, no tokenizer, too short
    found, _ = preflight_plan(with_teacher("teacher.path=./nowhere"), None)
    assert [(problem.key, problem.remedy.partition(" (")[0]) for problem in found] == [
        ("teacher.path", "no such directory")]


def test_how_the_teacher_is_served_may_change_when_a_run_is_resumed(with_teacher):
    moved = with_teacher("teacher.python=other", "teacher.args=[--x]", "teacher.env.A=b")
    assert resume_problems(with_teacher(), moved) == []
    assert [p.key for p in resume_problems(with_teacher(), with_teacher("teacher.path=other"))] == ["teacher.path"]


def test_teachers_gpus_without_a_teacher(experiment_file, hf_config):
    problem, = check_experiment(load_experiment(experiment_file, ["cluster.teacher_gpus=1"]), hf_config, 0)
    assert problem.key == "cluster.teacher_gpus"


def test_teachers_gpus_count(with_teacher, hf_config):
    exp = with_teacher("cluster.device=cuda")
    problem, = check_experiment(exp, hf_config, 4)  # 2 trainers, 1 engine, 2 teachers
    assert "the partitions need 5, 4 are visible" in str(problem)
    assert assign(exp, list("abcde")).teachers == (("d",), ("e",))
    assert assign(with_teacher("teacher.parallel.tp=2"), None).teachers == (("3", "4"),)
    assert assign(exp, None, trainers=False).teachers == ()
    shared = with_teacher("loop.mode=colocated_sync", "cluster={trainer_gpus: null, rollout_gpus: null, gpus: 2}")
    assert assign(shared, None).teachers == (("2",), ("3",))


def test_its_engines_serve_its_model_and_have_room_for_one_token_more(with_teacher, folder):
    exp = with_teacher("teacher.engine=sglang", "teacher.args=[--x]", "teacher.parallel.tp=2", "rollout.port=9000",
                       "eval.datasets.long={path: x, sampling: {max_response_tokens: 200}}")
    seen = teacher_experiment(exp)
    assert (seen.model.path, seen.rollout.engine, seen.rollout.args, seen.rollout.parallel.tp) == (
        str(folder / "model"), "sglang", ["--x"], 2)
    assert seen.engine_tokens == 16 + 16 + 1
    assert seen.rollout.port == 9000  # plus the engine's number, which goes on after the student's
    assert exp.rollout.engine == "vllm"
