"""A small, complete experiment for tests; sections can be overridden key by key."""
from mrl.config.schema import Experiment


def experiment(**sections) -> Experiment:
    base = {
        "model": {"path": "/nowhere", "dtype": "float32"},
        "data": {"train": "/nowhere.jsonl"},
        "batch": {"prompts_per_step": 2, "samples_per_prompt": 2, "max_tokens_per_microbatch": 4096},
        "rollout": {"python": "python"},
        "loop": {"steps": 2},
        "cluster": {"device": "cpu", "trainer_gpus": 1, "rollout_gpus": 1},
    }
    for name, values in sections.items():
        base[name] = {**base.get(name, {}), **values}
    return Experiment.model_validate(base)
