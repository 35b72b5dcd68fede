"""What may change when a run is resumed, and what may not."""
import pytest

from mrl.config.load import dump_experiment, load_experiment
from mrl.config.resume import resume_problems


def changed(experiment_file, *overrides) -> dict:
    """Texts of the problems by key, when the file's run is resumed with overrides."""
    problems = resume_problems(load_experiment(experiment_file), load_experiment(experiment_file, overrides))
    return {problem.key: str(problem) for problem in problems}


@pytest.mark.parametrize("override", [
    "loop.steps=99", "loop.collect_timeout_s=1", "log.dir=elsewhere", "log.tensorboard=false", "checkpoint.every=7",
    "eval.every=3", "eval.datasets.other.path=x", "rollout.start_timeout_s=9", "rollout.request_timeout_s=9",
    "reward.timeout_s=3", "reward.processes=2", "trainer.max_restarts=0", "rollout.max_restarts=0",
    "rollout.python=other", "rollout.args=[--x]", "rollout.env.A=b", "trainer.env.A=b", "rollout.host=0.0.0.0",
    "rollout.port=8000", "rollout.workers=3", "rollout.max_concurrent_requests=8", "sync.bucket_mb=3",
    "cluster.device=auto",
])
def test_may_differ(experiment_file, override):
    assert changed(experiment_file, override) == {}


@pytest.mark.parametrize("override", [
    "name=other", "seed=2", "model.path=other", "model.dtype=bfloat16", "data.train=other.jsonl",
    "data.shuffle=false", "algorithm.kl.coef=0.1", "batch.prompts_per_step=16",
    "trainer.parallel.tp=1", "trainer.optimizer.lr=1e-3", "rollout.parallel.tp=2", "rollout.sampling.temperature=0.7",
    "loop.mode=colocated_sync", "cluster.device=cuda", "cluster.trainer_gpus=4", "cluster.rollout_gpus=2",
])
def test_must_not_differ(experiment_file, override):
    assert list(changed(experiment_file, override)) == [override.partition("=")[0]]


def test_every_difference_is_named_with_both_values(experiment_file):
    texts = changed(experiment_file, "seed=2", "model.mtp=keep", "loop.steps=9")
    assert list(texts) == ["seed", "model.mtp"]
    assert "model.mtp = \"keep\"" in texts["model.mtp"] and "\"drop\", as in the run" in texts["model.mtp"]
    assert "another run directory" in texts["seed"]


def test_parts_of_the_reward_that_differ(experiment_file):
    assert list(changed(experiment_file, "reward.kind=math")) == ["reward.parts.exact", "reward.parts.math"]
    served = ("reward.parts.served.kind=http", "reward.kind=null")
    moved = ("reward.parts.served.url='http://b'", "reward.parts.served.retries=9", "reward.parts.served.timeout_s=1")
    problems = resume_problems(load_experiment(experiment_file, [*served, "reward.parts.served.url='http://a'"]),
                               load_experiment(experiment_file, [*served, *moved]))
    assert not problems
    texts = changed(experiment_file, "reward.ignore_case=true")
    assert list(texts) == ["reward.parts.exact.ignore_case"] and "false, as in the run" in str(texts)


def test_the_resolved_file_resumes_itself(experiment_file, folder):
    exp = load_experiment(experiment_file)
    dump_experiment(exp, folder / "config.yaml")
    assert resume_problems(load_experiment(folder / "config.yaml"), exp) == []
