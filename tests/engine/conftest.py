"""For all tests of this folder."""
import pytest

from mrl.engine import server


@pytest.fixture(autouse=True)
def _short_backoff(monkeypatch):
    monkeypatch.setattr(server, "FIRST_BACKOFF_S", 0.01)
