"""For all tests of this folder."""
import pytest

from mrl.engine import life


@pytest.fixture(autouse=True)
def _short_backoff(monkeypatch):
    monkeypatch.setattr(life, "FIRST_BACKOFF_S", 0.01)
