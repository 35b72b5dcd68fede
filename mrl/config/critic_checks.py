"""Checks of the critic against the rest of the experiment and both models. Pure; part of `mrl.config.checks`."""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import reduce
from typing import Any

from mrl.config.errors import Problem
from mrl.config.keys import leaf_keys
from mrl.config.schema import Experiment
from mrl.reshard.spec import layout_problems, model_spec

_SECTION = "algorithm.critic."
_PATH = _SECTION + "path"


def check_critic(exp: Experiment) -> Iterator[Problem]:
    """Everything about `algorithm.critic` that could not work, or that would have no effect."""
    critic, steps = exp.algorithm.critic, exp.loop.steps
    if not exp.algorithm.has_critic:
        yield from _check_unused(exp)
    elif critic.warmup_steps >= steps:
        yield Problem(_SECTION + "warmup_steps", str(critic.warmup_steps), f"less than loop.steps ({steps}): until "
                      "then the policy is not trained", "use fewer, or run more steps")


def check_critic_model(exp: Experiment, critic_config: Mapping[str, Any]) -> Iterator[Problem]:
    """`critic_config`: config.json of `algorithm.critic.path`. Whether it has the policy's tokens, its tokenizer says
    when the run starts; how many rows its embedding is padded to does not matter."""
    path = str(exp.algorithm.critic.path)
    try:
        spec = model_spec(critic_config)
        reasons = layout_problems(spec, exp.trainer.parallel.layout(exp.trainer_ranks))
    except (ValueError, KeyError) as error:
        yield Problem(_PATH, path, "a supported model that the trainers can hold", str(error))
        return
    if spec.untrainable:
        reasons.append(f"{spec.family.architecture} cannot be trained: {spec.untrainable}")
    if spec.moe and exp.trainer.parallel.tp > 1 and not exp.trainer.parallel.sequence_parallel:
        reasons.append("its experts need trainer.parallel.sequence_parallel: true")
    if reasons:
        yield Problem(_PATH, path, f"a model that fits trainer.parallel and model.path: {'; '.join(reasons)}",
                      "use another one; null is model.path itself")


def _check_unused(exp: Experiment) -> Iterator[Problem]:
    usual = type(exp.algorithm)()
    for key in (leaf.name for leaf in leaf_keys() if leaf.name.startswith(_SECTION)):
        parts = key.split(".")[1:]
        value = reduce(getattr, parts, exp.algorithm)
        if value != reduce(getattr, parts, usual):
            yield Problem(key, str(value).lower(),
                          f"nothing with algorithm.name {exp.algorithm.name}: there is no critic",
                          "remove the key, or set algorithm.name: gae")
