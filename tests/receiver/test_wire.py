"""Plans as they come over the wire: what they say, and that a plan that contradicts itself is not taken."""
import copy

import pytest
import torch

from mrl.receiver.mrl_receiver.wire import Part, Plan, SyncRequest
from tests.receiver.toy import EXPERTS, Draft, mixed_plan, wire_plan


def test_what_a_plan_says():
    plan = Plan.from_wire(mixed_plan())
    assert [bucket.mode for bucket in plan.buckets] == ["broadcast", "slices"] + ["direct"] * 8 + ["slices"]
    assert [bucket.index for bucket in plan.of_worker(1)] == [0, 1, 6, 7, 8, 9, 10]
    assert plan.broadcasters == (1,) and plan.point_to_point and plan.gathers
    assert plan.direct == {"q", "k", "o", *EXPERTS}
    assert [(part.name, start) for part, start in plan.buckets[1].parts] \
        == [("base", 0), ("flipped", 12), ("flipped", 22), ("pair.b", 27)]
    assert plan.buckets[1].nbytes == 2 * 22 * 4
    assert list(plan.tensor_kinds)[:4] == ["embed", "norm", "base", "flipped"]
    own = Plan.from_wire(mixed_plan(), worker=1)
    assert own.buckets == plan.of_worker(1) and (own.tensor_kinds, own.direct, own.digest) \
        == (plan.tensor_kinds, plan.direct, plan.digest)
    broadcast = Plan.from_wire(wire_plan())
    assert broadcast.direct == frozenset() and not broadcast.point_to_point and not broadcast.gathers
    assert broadcast.digest != plan.digest


def test_a_part_names_its_elements():
    part = Part("t", (4, 6), ((1, 3), (2, 5)), 7)
    assert (part.numel, part.whole, part.lattice) == (6, False, (8, (2, 3), (6, 1)))
    assert Part("t", (4, 6), ((0, 4), (0, 6)), 0).whole


def bytes_plan() -> dict:
    """One bucket of e4m3 values and of their scales, from byte 260 on."""
    draft = Draft(dtype="uint8", shapes={"w": (130, 2), "w_scale_inv": (2, 1)}).add("broadcast", ["w", "w_scale_inv"])
    wire = draft.wire()
    wire["contents"] = [[[0, None, 0, "float8_e4m3fn"], [1, [[0, 2], [0, 1]], 260, "float32"]]]
    wire["buckets"][0]["slices"][0]["numel"] = wire["buckets"][0]["slice_numel"] = 268
    return wire


def test_parts_may_have_dtypes_of_their_own_in_buckets_of_bytes():
    plan = Plan.from_wire(bytes_plan())
    assert plan.tensor_kinds == {"w": ((130, 2), torch.float8_e4m3fn), "w_scale_inv": ((2, 1), torch.float32)}
    flat = torch.arange(268, dtype=torch.int64).to(torch.uint8)
    (values, _), (scales, start) = plan.buckets[0].parts
    assert (scales.width, scales.numel, start, plan.buckets[0].nbytes) == (4, 2, 260, 268)
    assert values.values(flat).shape == (130, 2)
    assert torch.equal(values.values(flat).view(torch.uint8).view(-1), flat[:260])
    assert torch.equal(scales.values(flat, start).view(-1), flat[260:].view(torch.float32))


@pytest.mark.parametrize("path, value, words", [
    (("contents", 0, 1, 3), "float31", "w_scale_inv has dtype 'float31' in bucket 0"),
    (("contents", 0, 1, 2), 259, "w_scale_inv of shape .* does not fit its place"),
    (("contents", 0, 1, 2), 261, "w_scale_inv of shape .* does not fit its place"),
    (("buckets", 0, "slices", 0, "numel"), 267, "w_scale_inv of shape .* does not fit its place"),
    (("buckets", 0, "slice_numel"), 270, "w_scale_inv of shape .* does not fit its place"),
    (("buckets", 0, "dtype"), "bfloat16", "w has dtype 'float8_e4m3fn' in bucket 0 of dtype 'bfloat16'"),
])
def test_bytes_that_do_not_fit_are_refused(path, value, words):
    wire = bytes_plan()
    set_in(*path, value)(wire)
    with pytest.raises(ValueError, match=words):
        Plan.from_wire(wire)


def set_in(*path):
    """A change of one value somewhere in the wire form."""
    def change(wire):
        *way, key, value = path
        for step in way:
            wire = wire[step]
        wire[key] = value
    return change


FIRST = ("buckets", 0, "slices", 0)


@pytest.mark.parametrize("change, error, words", [
    (set_in("workers", 3), ValueError, "3 workers do not make up nodes of 2"),
    (set_in("buckets", 1, "index", 0), ValueError, "indices must rise"),
    (set_in("buckets", []), ValueError, "indices must rise"),
    (set_in("buckets", 0, "mode", "shout"), ValueError, "bucket 0 has mode 'shout'"),
    (set_in("buckets", 1, "mode", "broadcast"), ValueError, "'broadcast' and 2 slices"),
    (set_in("buckets", 0, "dtype", "float31"), ValueError, "dtype 'float31'"),
    (set_in("buckets", 2, "worker", None), ValueError, "mode 'direct' is for worker None"),
    (set_in("buckets", 2, "worker", 2), ValueError, "is for worker 2"),
    (set_in("buckets", 0, "worker", 1), ValueError, "mode 'broadcast' is for worker 1"),
    (set_in(*FIRST, "sender", 3), ValueError, "from sender 3; .* 3 senders"),
    (set_in(*FIRST, "numel", 27), ValueError, "27 elements from .* 26 elements"),
    (set_in(*FIRST, "numel", 25), ValueError, "norm of shape .* does not fit its place in bucket 0"),
    (set_in("contents", 0, 1, 2, 19), ValueError, "norm of shape .* does not fit its place in bucket 0"),
    (set_in("contents", 0, 0, 0, 99), IndexError, "out of range"),
    (set_in("groups", 0, 0, 99), IndexError, "out of range"),
    (set_in("tensors", "more", [3]), ValueError, "more is in no bucket"),
    (set_in("tensors", "norm", [7]), ValueError, "norm of shape"),
    (set_in("contents", 2, 0, 1, [[1, 2], [0, 5]]), ValueError, "15 of 15 elements, some of them"),
    (set_in("contents", 2, 0, 1, [[2, 3], [0, 4]]), ValueError, "flipped .* 14 of 15 elements"),
    (set_in("contents", 2, 0, 1, [[2, 4], [0, 5]]), ValueError, "flipped of .* does not fit"),
    (set_in("buckets", 5, "dtype", "bfloat16"), ValueError, "o goes both as"),
    (set_in("buckets", 0, "slices", 0, {}), KeyError, "contents"),
    (set_in("workers", "two"), TypeError, "not supported between"),
])
def test_a_malformed_plan_is_not_taken(change, error, words):
    wire = copy.deepcopy(mixed_plan())
    change(wire)
    with pytest.raises(error, match=words):
        Plan.from_wire(wire)


def test_a_request_survives_the_wire():
    request = SyncRequest("run", 1, 2, (3, 4), 5, "link", True, "host", 6, mixed_plan(), 7, "gloo", True, 8.0, True, 4)
    assert SyncRequest.from_json(request.to_json()) == request
