"""The teacher's engines: the same gates and servers as the student's, for another model, whose weights stay."""
from __future__ import annotations

from mrl.config.schema import Eval, Experiment


def teacher_experiment(experiment: Experiment) -> Experiment:
    """The experiment as the teacher's engines see it: their model, engine and parallel sizes in place of the student's.

    They are asked for log-probs of whole samples, and must produce one token more to answer. Waits, restarts and the
    number of requests at once are those of `rollout`.
    """
    teacher, rollout = experiment.teacher, experiment.rollout
    sampling = rollout.sampling.model_copy(
        update={"max_response_tokens": rollout.sampling.max_response_tokens + 1})
    return experiment.model_copy(update={
        "model": experiment.model.model_copy(update={"path": teacher.path, "dtype": teacher.dtype}),
        "rollout": rollout.model_copy(update={"sampling": sampling, "engine": teacher.engine, "python": teacher.python,
                                              "parallel": teacher.parallel, "args": teacher.args, "env": teacher.env}),
        "trainer": experiment.trainer.model_copy(update={"moe_routing": "own"}),
        "eval": Eval(),
    })
