"""Every element once: shards add up, replicas count once, gaps and differences are named."""
import pytest

from mrl.engine.coverage import coverage_problems, summary

TENSORS = {"w": (4, 6)}
TOP, BOTTOM, ALL = [0, [2, 6], [6, 1]], [12, [2, 6], [6, 1]], [0, [4, 6], [6, 1]]


def reply(*holdings, opaque=None):
    return {"holdings": {"w": [[*lattice, checksum] for lattice, checksum in holdings]}, "opaque": opaque or {}}


def sent(shared=None, **direct):
    """What the senders say: to all, or to workers "w0", "w1"."""
    return {"shared": {} if shared is None else {"w": shared},
            "direct": {worker[1:]: {"w": value} for worker, value in direct.items()}}


def test_shards_and_replicas():
    shards = [reply((TOP, 5)), reply((BOTTOM, -7))]
    assert coverage_problems(TENSORS, shards, sent(-2)) == []
    assert coverage_problems(TENSORS, [reply((ALL, 9)), reply((ALL, 9))], sent(9)) == []
    two_of_each = [reply((TOP, 5)), reply((TOP, 5)), reply((BOTTOM, -7)), reply((BOTTOM, -7))]
    assert coverage_problems(TENSORS, two_of_each, sent(-2)) == []


def test_what_is_sent_as_shards_must_add_up_on_each_worker():
    shards = [reply((TOP, 5)), reply((BOTTOM, -7)), reply((BOTTOM, -7)), reply()]
    assert coverage_problems(TENSORS, shards, sent(w0=5, w1=-7, w2=-7)) == []
    assert coverage_problems(TENSORS, shards, sent(w0=5, w1=-6, w2=-7)) \
        == ["w: worker 1's checksum -7 is not the trainer's -6"]
    assert coverage_problems(TENSORS, shards, sent(w0=5, w1=-7)) == ["w: worker 2's checksum -7 is not the trainer's 0"]
    whole = [reply((TOP, 5), (BOTTOM, 1))]
    assert coverage_problems(TENSORS, whole, sent(w0=6)) == []
    assert "takes 12 of its 24" in coverage_problems(TENSORS, [reply((TOP, 5))], sent(w0=5))[0]


def test_sums_wrap_around():
    assert coverage_problems(TENSORS, [reply((TOP, 2**63 - 1)), reply((BOTTOM, 1))], sent(-2**63)) == []


def test_problems_are_named():
    assert "takes 12 of its 24" in coverage_problems(TENSORS, [reply((TOP, None))], None)[0]
    assert "takes 0 of its 24" in coverage_problems(TENSORS, [{"holdings": {}, "opaque": {}}], None)[0]
    assert "takes 36 of its 24" in coverage_problems(TENSORS, [reply((ALL, None)), reply((TOP, None))], None)[0]
    assert "worker 1's copy differs" in coverage_problems(TENSORS, [reply((ALL, 9)), reply((ALL, 8))], sent(9))[0]
    assert "checksum 9 is not the trainer's 8" in coverage_problems(TENSORS, [reply((ALL, 9))], sent(8))[0]


@pytest.mark.parametrize("sums", [(9, 8), (8, 9)])
def test_copies_on_one_worker_must_be_equal(sums):
    """As an engine has that keeps a tied embedding twice."""
    twice = [reply(*((ALL, one) for one in sums))]
    for right in (sent(9), sent(w0=9)):
        assert "w: worker 0's copy differs from another" in coverage_problems(TENSORS, twice, right)
    assert coverage_problems(TENSORS, [reply((ALL, 9), (ALL, 9))], sent(9)) == []


def test_opaque_tensors_are_passed_over():
    assert coverage_problems(TENSORS, [reply(opaque={"w": "converted"})], sent(1)) == []


def test_summary_is_short():
    assert summary([f"p{i}" for i in range(8)]) == "p0; p1; p2; p3; p4; and 3 more"
