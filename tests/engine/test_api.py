"""Versions are ordered as pairs; errors and results survive a pickle, as Ray needs."""
import pickle

import pytest

from mrl.engine.api import Completion, EngineClosed, EngineLost, EngineStatus, SyncError, Version


def test_versions():
    assert Version(0, 9) < Version(1, 0) < Version(1, 2)
    assert str(Version(1, 7)) == "1:7" and Version.parse("1:7") == Version(1, 7)
    for bad in ("7", "1:", "1:x", ""):
        with pytest.raises(ValueError, match="attempt:step"):
            Version.parse(bad)


@pytest.mark.parametrize("thing", [
    Completion([1], [-0.5], "stop", Version(0, 1)), EngineStatus(0, 1, "dirty", None, 0, None, 1),
])
def test_pickle(thing):
    assert pickle.loads(pickle.dumps(thing)) == thing


@pytest.mark.parametrize("kind", [EngineClosed, EngineLost, SyncError])
def test_errors_pickle(kind):
    copy = pickle.loads(pickle.dumps(kind("why")))
    assert type(copy) is kind and str(copy) == "why"
