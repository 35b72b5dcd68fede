"""Graders as a grader process makes them, for the tests of this folder."""
from mrl.config.schema import Reward
from mrl.reward.api import Grader, Sample
from mrl.reward.graders import make_grader


def grader(kind: str, **keys) -> Grader:
    """The grader of a part with these keys, validated as in an experiment file."""
    return make_grader(Reward.model_validate({"kind": kind, **keys}).parts[kind].model_dump())


def score(kind: str, response: str, answer, *, tokens: int = 0, row=None, **keys) -> float:
    return float(grader(kind, **keys).grade(Sample("p", response, answer, row or {}, tokens)).score)
