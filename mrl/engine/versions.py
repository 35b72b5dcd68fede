"""The engine releases that mrl is tested with. Those between the oldest and the newest are taken to work as well."""
from __future__ import annotations

import re
from typing import Mapping, Optional

TESTED: Mapping[str, tuple[str, ...]] = {"vllm": ("0.26.0", "0.32.0"), "sglang": ("0.5.17", "0.5.23")}
"""By rollout.engine, oldest first."""


def version_warning(engine: str, version: Optional[str]) -> Optional[str]:
    """What to say about an engine of this version (None: it does not tell); None when it is within the tested range."""
    tested = TESTED[engine]
    if version is not None and _release(tested[0]) <= _release(version) <= _release(tested[-1]):
        return None
    return f"{engine} {version or 'of an unknown version'} is not tested with mrl; tested are {' and '.join(tested)}"


def _release(version: str) -> tuple[int, ...]:
    """The three numbers of a release; what follows them (.post1, rc2, +cu130) is passed over."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(number) for number in (numbers.group() if numbers else "0").split("."))[:3]
