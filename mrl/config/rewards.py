"""The kinds of reward, as types: one class a kind, its fields the keys of a part of `reward`.

Descriptions are what docs/rewards.md and `mrl check --keys` print. What a kind does is in `mrl/reward/<kind>.py`.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Optional, Union, get_args

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from mrl.config.section import Section


class Part(Section):
    """What every kind has.

    remote: it is asked over the network, and needs no process that can be killed. checks_answers: it can tell from a
    reference answer alone that no response could be compared with it.
    """

    remote: ClassVar[bool] = False
    checks_answers: ClassVar[bool] = True

    weight: float = Field(1.0, description="factor of this part in the sum that is the reward; may be negative")
    timeout_s: PositiveFloat = Field(10.0, description="scoring one response (of a batch or group: all of them) may "
                                     "take so long, then it is ended and scores 0")


class TextPart(Part):
    """Kinds that look for an answer in the response."""

    thinking: Literal["ignore", "count"] = Field(
        "ignore", description="ignore: only what follows the last `</think>` can hold the answer (an opened `<think>` "
                              "that never closes holds none); count: the whole response can")


class Math(TextPart):
    kind: Literal["math"]
    percent: Literal["optional", "value"] = Field(
        "optional", description="what 50% equals. optional: 50 and 0.5 too; value: 0.5 alone")
    units: Literal["ignore", "match"] = Field(
        "ignore", description="ignore: a unit after a number does not count; match: it must be the reference answer's")


class Gsm8k(TextPart):
    kind: Literal["gsm8k"]
    marker: Literal["required", "optional"] = Field(
        "optional", description="required: the number must follow `####`; optional: else a box, else the last number")


class MultipleChoice(TextPart):
    kind: Literal["multiple_choice"]
    choices: Annotated[int, Field(ge=2, le=26)] = Field(10, description="letters that are choices: A and so on")


class Exact(TextPart):
    kind: Literal["exact"]
    ignore_case: bool = Field(False, description="compare without regard to upper and lower case")


class Code(TextPart):
    kind: Literal["code"]
    timeout_s: PositiveFloat = Field(60.0, description="all tests of one response may take so long, then it is ended "
                                     "and scores 0")
    score: Literal["all", "fraction"] = Field(
        "all", description="all: 1 if every test passes, else 0; fraction: the share of tests that pass")
    test_timeout_s: PositiveFloat = Field(5.0, description="longest run of one test; longer is a failed test")
    memory_mb: PositiveInt = Field(512, description="address space of each process of the program, MiB")
    file_mb: PositiveInt = Field(16, description="largest file, and largest output of a test, MiB")
    processes: PositiveInt = Field(16, description="processes and threads of the program at once")
    isolation: Literal["if_possible", "required"] = Field(
        "if_possible", description="namespaces without network and with read-only files; required: no run where the "
                                   "machine does not allow them; if_possible: a warning then")


class Rouge(TextPart):
    kind: Literal["rouge"]
    metric: Literal["rouge1", "rouge2", "rougeL", "mean"] = Field(
        "rougeL", description="which F-measure is the reward; mean: of the three")
    stemmer: bool = Field(True, description="compare English words by their stems")


class Format(Part):
    checks_answers: ClassVar[bool] = False

    kind: Literal["format"]
    pattern: str = Field(r"<think>(?:(?!</?think>).)*</think>\s*(?!\s)(?:(?!</?think>).)+", description=
                         "regular expression that the whole response must match, . meaning any character")


class Length(Part):
    checks_answers: ClassVar[bool] = False

    kind: Literal["length"]
    unit: Literal["tokens", "characters"] = Field("tokens", description="what is counted in the response")
    full: NonNegativeInt = Field(description="length that scores 1")
    zero: NonNegativeInt = Field(description="length that scores 0; between the two it is linear, beyond them flat")


class ReasoningGym(TextPart):
    kind: Literal["reasoning_gym"]
    tag: str = Field("answer", pattern=r"^\w+$",
                     description="the last `<tag>...</tag>` holds the answer, else a box, else the whole response")


class Custom(Part):
    checks_answers: ClassVar[bool] = False

    kind: Literal["custom"]
    function: str = Field(description="'path.py:function', sync or async")
    batch: bool = Field(False, description="call it once for all responses to one prompt; it returns a list of numbers")


class Server(Part):
    """Kinds that ask a server."""

    remote: ClassVar[bool] = True
    checks_answers: ClassVar[bool] = False

    url: str = Field(pattern=r"^https?://[^/\s]", description="address of the server, http:// or https://")
    timeout_s: PositiveFloat = Field(60.0, description="longest wait for one answer, each retry anew")
    retries: NonNegativeInt = Field(3, description="further tries after a lost connection, a time-out, a 429 or a 5xx")
    backoff_s: PositiveFloat = Field(1.0, description="wait before the first retry; each later one doubles it")
    max_concurrent: PositiveInt = Field(32, description="requests in flight per rollout worker")
    api_key_env: Optional[str] = Field(
        None, description="environment variable of the rollout workers that holds a bearer token; null: none is sent")


class Http(Server):
    kind: Literal["http"]


class RewardModel(Server):
    kind: Literal["model"]
    api: Literal["vllm_pooling", "sglang_classify", "chat"] = Field(
        description="how it is asked. vllm_pooling, sglang_classify: a scalar reward model behind vLLM's /pooling or "
                    "SGLang's /classify; chat: a generative one behind /v1/chat/completions")
    model: str = Field(description="the served model's name")
    tokenizer: Optional[str] = Field(
        None, description="api sglang_classify: tokenizer directory or hub id, for the model's chat template")
    instruction: Optional[str] = Field(
        None, description="api chat: path of a text with {prompt}, {response} and {answer}; null: the built-in one")
    verdict: str = Field(r"Score:\s*(-?\d+(?:\.\d+)?)", description=
                         "api chat: regular expression; the group of its last match in the judge's reply is the score")
    lowest: float = Field(0.0, description="api chat: the score that becomes 0")
    highest: float = Field(10.0, description="api chat: the score that becomes 1; one beyond the two is a fault")
    max_tokens: PositiveInt = Field(1024, description="api chat: longest reply")


AnyPart = Annotated[Union[Math, Gsm8k, MultipleChoice, Exact, Code, Rouge, Format, Length, ReasoningGym, Custom, Http,
                          RewardModel], Field(discriminator="kind")]

KINDS: dict[str, type[Part]] = {
    get_args(part.model_fields["kind"].annotation)[0]: part for part in get_args(get_args(AnyPart)[0])}


def part_class(place: Sequence[str]) -> tuple[type[Part] | None, int]:
    """The class of the part that a place `..., reward, parts, name, kind, key...` is inside of, and where `key` is.

    (None, 0) for a place outside of parts.
    """
    for position in range(len(place) - 4):
        if tuple(place[position:position + 2]) == ("reward", "parts"):
            return KINDS.get(place[position + 3]), position + 4
    return None, 0


def judging_parts(parts: Mapping[str, Part]) -> list[str]:
    """Names of the parts that say whether a response is right, where the file does not.

    Of those of positive weight the ones that compare it with the reference answer, or, if none does, all of them.
    Without a positive weight, every part.
    """
    positive = [name for name, part in parts.items() if part.weight > 0]
    return [name for name in positive if parts[name].checks_answers] or positive or list(parts)


def named_parts(reward: dict[str, Any], others: set[str]) -> dict[str, Any]:
    """The section with `kind: X` written as the part X it stands for; without it as it is.

    others: the section's own keys. All further keys are the part's. A null (how a file drops what its base says) is no
    kind. Raises ValueError where both `kind` and `parts` are given.
    """
    if reward.get("kind") is None:
        return reward
    if reward.get("parts") is not None:
        raise ValueError("reward.kind is short for one part, and reward.parts lists all of them: remove one of the two")
    own = {key: value for key, value in reward.items() if key in others - {"kind", "parts"}}
    part = {key: value for key, value in reward.items() if key not in own and key != "parts"}
    return {**own, "parts": {str(reward["kind"]): part}}
