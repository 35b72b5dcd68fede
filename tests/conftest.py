"""How tests are shared out when pytest runs in several processes (`tests/run.sh`): those that share an engine, a Ray or
models made for them stay together, and what takes longest begins first."""
from __future__ import annotations

import re

import hypothesis
import pytest

# The same examples in every run, however long one takes.
hypothesis.settings.register_profile("reproducible", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("reproducible")

LONGEST = ("e2e", "stream-vllm", "stream-sglang", "trainer", "stream", "receiver", "reshard")


def group_of(nodeid: str) -> str:
    """The test's folder (its file, where it is in none), and in tests/stream the engine that it shares with others."""
    folder = nodeid.partition("::")[0].partition("/")[0]
    engine = re.search(r"\[(vllm|sglang)\b", nodeid)
    return f"{folder}-{engine[1]}" if folder == "stream" and engine else folder


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the tests marked long too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest groups first; without --all no test that is marked long."""
    if not config.getoption("--all"):
        for item in items:
            if item.get_closest_marker("long"):
                item.add_marker(pytest.mark.skip(reason="takes long: needs --all"))
    items.sort(key=lambda item: LONGEST.index(group) if (group := group_of(item.nodeid)) in LONGEST else len(LONGEST))


@pytest.fixture(scope="session")
def one_rank():
    """torch's default process group, of this process alone. A process can have it once: whoever needs it takes this."""
    from torch import distributed

    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    """pytest-xdist's scheduler, with whole groups as what it gives to a process at a time."""
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return ByGroup(config, log)
