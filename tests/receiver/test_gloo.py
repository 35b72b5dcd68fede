"""gloo between real processes: two senders and two workers."""
import pytest

from tests.receiver.transport_gang import run

WORLD = 4


@pytest.fixture(scope="module")
def said() -> list[dict]:
    return run("gloo", WORLD, "transfers", "broadcast", "gather", "patience", "lose")


def test_every_byte_of_every_dtype_arrives(said):
    assert [rank[scenario] for rank in said for scenario in ("transfers", "broadcast", "gather")] == \
        [{"wrong": []}] * 3 * WORLD


def test_the_deadline_holds_and_who_gives_up_takes_the_others_along(said):
    first, *others = [rank["patience"] for rank in said]
    assert 1 <= first["seconds"] < 15 and "imed out" in first["error"]
    assert all(other["seconds"] < 15 and "link/patience/patience: " in other["error"] for other in others), others


def test_a_killed_peer_is_noticed_at_once(said):
    assert "lose" not in said[-1]
    for rank in said[:-1]:
        assert rank["lose"]["seconds"] < 15 and rank["lose"]["closed"] == "link link/lose/lose is closed"
