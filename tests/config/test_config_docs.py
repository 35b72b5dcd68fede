"""docs/configuration.md lists exactly the keys there are."""
from pathlib import Path

from mrl.config.keys import Key, leaf_keys

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def row(key: Key) -> str:
    cells = [f"`{key.name}`", key.type, f"`{key.default}`", key.description.replace("|", "\\|")]
    return f"| {' | '.join(cells)} |"


def test_the_table_of_keys_is_current():
    listed = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    assert listed == [row(key) for key in leaf_keys()]
