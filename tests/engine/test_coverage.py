"""Every element once: shards add up, replicas count once, gaps and differences are named."""
from mrl.engine.coverage import coverage_problems, summary
from mrl.receiver.mrl_receiver.wire import Item

ITEMS = {"w": Item("w", (4, 6), "float32", 0, 24)}
TOP, BOTTOM, ALL = [0, [2, 6], [6, 1]], [12, [2, 6], [6, 1]], [0, [4, 6], [6, 1]]


def reply(*holdings, opaque=None):
    return {"holdings": {"w": [[*lattice, checksum] for lattice, checksum in holdings]}, "opaque": opaque or {}}


def test_shards_and_replicas():
    shards = [reply((TOP, 5)), reply((BOTTOM, -7))]
    assert coverage_problems(ITEMS, shards, {"w": -2}) == []
    assert coverage_problems(ITEMS, [reply((ALL, 9)), reply((ALL, 9))], {"w": 9}) == []
    two_of_each = [reply((TOP, 5)), reply((TOP, 5)), reply((BOTTOM, -7)), reply((BOTTOM, -7))]
    assert coverage_problems(ITEMS, two_of_each, {"w": -2}) == []


def test_sums_wrap_around():
    assert coverage_problems(ITEMS, [reply((TOP, 2**63 - 1)), reply((BOTTOM, 1))], {"w": -2**63}) == []


def test_problems_are_named():
    assert "takes 12 of its 24" in coverage_problems(ITEMS, [reply((TOP, None))], None)[0]
    assert "takes 0 of its 24" in coverage_problems(ITEMS, [{"holdings": {}, "opaque": {}}], None)[0]
    assert "takes 36 of its 24" in coverage_problems(ITEMS, [reply((ALL, None)), reply((TOP, None))], None)[0]
    assert "worker 1's copy differs" in coverage_problems(ITEMS, [reply((ALL, 9)), reply((ALL, 8))], {"w": 9})[0]
    assert "checksum 9 is not the trainer's 8" in coverage_problems(ITEMS, [reply((ALL, 9))], {"w": 8})[0]


def test_opaque_tensors_are_passed_over():
    assert coverage_problems(ITEMS, [reply(opaque={"w": "converted"})], {"w": 1}) == []


def test_summary_is_short():
    assert summary([f"p{i}" for i in range(8)]) == "p0; p1; p2; p3; p4; and 3 more"
