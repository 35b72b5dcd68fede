"""What is wrong with a supervised fine-tuning is said before it starts."""
import pytest

from mrl.config.load import ConfigError, dump_experiment, load_sft
from mrl.config.resume import resume_problems
from mrl.config.sft_checks import check_sft


@pytest.fixture
def sft_file(content, write, folder):
    return write({
        "out": str(folder / "out"), "steps": 4, "model": content["model"], "data": content["data"],
        "batch": {"samples_per_step": 8, "max_tokens_per_microbatch": 64}, "trainer": content["trainer"],
        "cluster": {"device": "cpu", "trainer_gpus": 2}}, "sft.yaml")


@pytest.mark.parametrize("overrides, key, words", [
    (["cluster.trainer_gpus=3"], "cluster.trainer_gpus", "cannot be split into replicas of trainer.parallel.tp 2"),
    (["cluster.trainer_gpus=8", "batch.samples_per_step=3"], "batch.samples_per_step", "at least 4"),
    (["model.dtype=bfloat16"], "model.dtype", "float32 on cpu"),
    (["cluster.device=cuda"], "cluster.trainer_gpus", "at most the 1 GPUs"),
    (["eval.every=2"], "data.eval", "eval.every is 2"),
    (["data.max_prompt_tokens=65"], "batch.max_tokens_per_microbatch", "one sample must fit"),
    (["data.max_prompt_tokens=300", "batch.max_tokens_per_microbatch=512"], "data.max_prompt_tokens", "at most 256"),
    (["trainer.parallel.pp=3", "cluster.trainer_gpus=6"], "trainer.parallel.pp", "num_hidden_layers 4"),
    (["trainer.moe.aux_loss_coef=0.1"], "trainer.moe.aux_loss_coef", "no experts"),
])
def test_settings_against_each_other_and_the_model(sft_file, hf_config, overrides, key, words):
    assert check_sft(load_sft(sft_file), hf_config, 1) == []
    problem, = check_sft(load_sft(sft_file, overrides), hf_config, 1)
    assert problem.key == key and words in str(problem)


def test_a_model_that_is_not_supported(sft_file, hf_config):
    problem, = check_sft(load_sft(sft_file), {**hf_config, "architectures": ["Unheard"]}, 1)
    assert problem.key == "model.path" and "Unheard" in problem.remedy


def test_it_may_be_resumed_for_longer_but_not_with_other_data(sft_file, folder):
    exp = load_sft(sft_file)
    dump_experiment(exp, folder / "config.yaml")
    assert resume_problems(load_sft(folder / "config.yaml"), load_sft(sft_file, ["steps=9", "out=other"])) == []
    problem, = resume_problems(exp, load_sft(sft_file, ["batch.samples_per_step=4"]))
    assert problem.key == "batch.samples_per_step"


def test_unknown_keys_have_the_keys_of_this_kind_of_file(sft_file):
    with pytest.raises(ConfigError, match="did you mean batch.samples_per_step?"):
        load_sft(sft_file, ["batch.sample_per_step=4"])
