"""What is wrong between a teacher and the rest of the experiment."""
import pytest

from mrl.cluster.placement import assign
from mrl.config.checks import check_experiment
from mrl.config.load import load_experiment
from mrl.engine.teacher import teacher_experiment

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
