"""Checks across the keys of `reward`. Pure, like `mrl.config.checks`, which calls them."""
from __future__ import annotations

import re
from collections.abc import Iterator

from mrl.config.errors import Problem
from mrl.config.rewards import Code, Custom, Format, Length, Part, RewardModel
from mrl.config.schema import Experiment, Reward

RESERVED_NAMES = ("mean", "max", "min", "errors")
"""Names of metrics `reward/<name>` that no part may have."""


def check_rewards(exp: Experiment) -> Iterator[Problem]:
    """`check_reward` of the training data's reward and of those that held-out data sets have of their own."""
    for section, reward in exp.rewards.items():
        yield from check_reward(section, reward)


def check_reward(section: str, reward: Reward) -> Iterator[Problem]:
    """Everything about the parts of a reward that could not work; `section`: its dotted key."""
    for name, part in reward.parts.items():
        key = f"{section}.parts.{name}"
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name) or name in RESERVED_NAMES:
            yield Problem(key, name, "a name of letters, digits, _ and -, since its metric is reward/<name>; not one "
                          f"of {', '.join(RESERVED_NAMES)}", "rename the part")
        yield from _check_part(key, part)
    for index, name in enumerate(reward.accuracy.parts or []):
        if name not in reward.parts:
            yield Problem(f"{section}.accuracy.parts.{index}", name, f"a name in {section}.parts: "
                          f"{', '.join(reward.parts)}", "correct it, or remove the key")
    if all(part.weight == 0 for part in reward.parts.values()):
        yield Problem(f"{section}.parts", "weights that are all 0", "one weight that is not 0", "set a weight")


def _check_part(key: str, part: Part) -> Iterator[Problem]:
    if isinstance(part, Custom):
        file, _, name = part.function.rpartition(":")
        if not file.endswith(".py") or not name.isidentifier():
            yield Problem(f"{key}.function", part.function, "'path.py:function' with kind custom",
                          "for example function: rewards/mine.py:score")
    if isinstance(part, Length) and part.full == part.zero:
        yield Problem(f"{key}.zero", str(part.zero), f"another length than {key}.full", "move one of the two")
    if isinstance(part, Code) and part.test_timeout_s > part.timeout_s:
        yield Problem(f"{key}.test_timeout_s", str(part.test_timeout_s),
                      f"at most {key}.timeout_s ({part.timeout_s}), the time for all tests", "raise timeout_s")
    if isinstance(part, Format):
        yield from _check_pattern(f"{key}.pattern", part.pattern, groups=0)
    if isinstance(part, RewardModel):
        yield from _check_model(key, part)


def _check_model(key: str, part: RewardModel) -> Iterator[Problem]:
    yield from _check_pattern(f"{key}.verdict", part.verdict, groups=1)
    if part.lowest >= part.highest:
        yield Problem(f"{key}.lowest", str(part.lowest), f"less than {key}.highest ({part.highest})", "lower it")
    if part.api == "sglang_classify" and part.tokenizer is None:
        yield Problem(f"{key}.tokenizer", "null", "a tokenizer directory or hub id with api sglang_classify, which "
                      "takes token ids and applies no chat template", "name the reward model's tokenizer")
    if part.api != "sglang_classify" and part.tokenizer is not None:
        yield Problem(f"{key}.tokenizer", part.tokenizer, f"null with api {part.api}: the server applies the template",
                      "remove the key")
    if part.api != "chat" and part.instruction is not None:
        yield Problem(f"{key}.instruction", part.instruction, f"null with api {part.api}", "set api: chat")


def _check_pattern(key: str, pattern: str, groups: int) -> Iterator[Problem]:
    try:
        found = re.compile(pattern).groups
    except re.error as error:
        yield Problem(key, pattern, "a regular expression", str(error))
        return
    if groups and found != groups:
        yield Problem(key, pattern, f"a regular expression with {groups} group, not {found}",
                      "write other groups as (?:...)")
