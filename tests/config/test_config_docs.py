"""docs/configuration.md and docs/rewards.md list exactly the keys there are."""
from pathlib import Path

from mrl.config.keys import Key, leaf_keys, part_keys
from mrl.config.rewards import KINDS

DOCS = Path(__file__).parents[2] / "docs"


def row(key: Key) -> str:
    cells = [f"`{key.name}`", key.type, f"`{key.default}`", key.description.replace("|", "\\|")]
    return f"| {' | '.join(cells)} |"


def rows_in(page: str, start: str) -> list[str]:
    return [line for line in (DOCS / page).read_text(encoding="utf-8").splitlines() if line.startswith(start)]


def test_the_table_of_keys_is_current():
    assert rows_in("configuration.md", "| `") == [row(key) for key in leaf_keys()]


def test_the_table_of_the_keys_of_a_reward_is_current():
    listed = [line for line in rows_in("rewards.md", "| ") if line.count(" | `") == 2]
    assert listed == [f"| {kinds} {row(key)}" for kinds, key in part_keys()]


def test_every_kind_of_reward_is_explained():
    explained = [line.split("`")[1] for line in rows_in("rewards.md", "| `")]
    assert explained[:len(KINDS)] == list(KINDS)
