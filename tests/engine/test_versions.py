"""Releases within the tested range are accepted in silence; others get a warning that names the tested ones."""
import pytest

from mrl.engine.engines import SERVERS
from mrl.engine.versions import TESTED, version_warning


def test_every_engine_has_tested_releases():
    assert TESTED.keys() == SERVERS.keys()
    assert all(version_warning(engine, version) is None for engine in TESTED for version in TESTED[engine])


@pytest.mark.parametrize("engine, version, fine", [
    ("sglang", "0.5.18.post1", True), ("sglang", "0.5.20rc1", True), ("sglang", "0.5.23.post2", True),
    ("sglang", "0.5.9", False), ("sglang", "0.5.24", False), ("sglang", "0.6.0", False),
    ("vllm", "0.28.1+cu130", True), ("vllm", "0.25.1", False), ("vllm", "0.33.0", False), ("vllm", "1.0", False),
])
def test_ranges(engine, version, fine):
    warning = version_warning(engine, version)
    assert warning is None if fine else version in warning and all(tested in warning for tested in TESTED[engine])


def test_an_unknown_version():
    assert "of an unknown version" in version_warning("vllm", None)
