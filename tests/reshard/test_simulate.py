"""Replays of plans small enough to be worked out by hand, and of random ones."""
import random

import pytest

from mrl.reshard.engine_layout import EngineLayout
from mrl.reshard.events import Clock, Deadlock, Event, Fabric, Link
from mrl.reshard.network import Network
from mrl.reshard.plan import Outline, SliceOutline
from mrl.reshard.simulate import simulate

GB = 10**9
NETWORK = Network(gpus_per_node=4, nic_gb_s=10, nvlink_gb_s=100, latency_s=0)
MEMORY = 1000.0  # GB/s: a copy of 10 GB, read and written, takes 0.02 s
TEN = 10 * GB  # one second on a NIC
COPY = 0.02


def outline(index, mode, *slices, engines=(0,), worker=None):
    """`slices`: (bytes, ranks), sent by the first of the ranks."""
    return Outline(index, "bfloat16", mode, engines, worker, 0,
                   tuple(SliceOutline(b, b, tuple(r), r[0]) for b, r in slices))


def direct(index, sender, worker, nbytes=TEN, engines=(0,)):
    return outline(index, "direct", (nbytes, [sender]), engines=engines, worker=worker)


def replay(outlines, network=NETWORK, buffers=2, **engines):
    return simulate(outlines, EngineLayout(**engines), network, buffers, MEMORY)


def bytes_of(simulated, kind):
    return sum(round(use.links * use.mean_bytes) for use in simulated.uses if use.kind == kind)


# -- worked out by hand


def test_one_sender_one_worker():
    assert replay([direct(0, 0, 0)]).seconds == pytest.approx(COPY + 1 + COPY)
    # the copies of one bucket run beside the transfer of another: transfers follow one another without a gap
    assert replay([direct(i, 0, 0) for i in range(3)]).seconds == pytest.approx(COPY + 3 + COPY)
    # with one buffer on either side the transfer waits for both copies, which run at the same time
    assert replay([direct(i, 0, 0) for i in range(3)], buffers=1).seconds == pytest.approx(3 * (COPY + 1) + COPY)


def test_two_senders_share_a_worker_and_two_workers_do_not_wait():
    assert replay([direct(0, 0, 0), direct(1, 1, 0)]).seconds == pytest.approx(COPY + 2 + COPY)
    assert replay([direct(0, 0, 0), direct(1, 1, 1)], tp=2).seconds == pytest.approx(COPY + 1 + COPY)


def test_a_sender_shares_its_nic_among_engines_that_receive_at_the_same_time():
    both = replay([direct(0, 0, 0, engines=(0, 1))], count=2)
    assert both.seconds == pytest.approx(COPY + 2 + COPY)
    assert both.bottleneck.kind == "trainer NIC out"


def test_an_order_that_makes_workers_wait_for_the_same_sender_costs_time():
    """Workers 0 and 1 both begin with rank 0: rank 1 has nothing to do meanwhile, and then both want it."""
    clashing = [direct(0, 0, 0), direct(1, 0, 1), direct(2, 1, 0), direct(3, 1, 1)]
    crossing = [direct(0, 0, 0), direct(1, 1, 1), direct(2, 1, 0), direct(3, 0, 1)]
    assert replay(clashing, tp=2).seconds == pytest.approx(COPY + 3 + COPY)
    assert replay(crossing, tp=2).seconds == pytest.approx(COPY + 2 + COPY)


def test_latency():
    network = Network(gpus_per_node=4, nic_gb_s=10, nvlink_gb_s=100, latency_s=1e-3)
    many = replay([direct(i, 0, 0, nbytes=1) for i in range(1000)], network)
    assert many.seconds == pytest.approx(1000 * 1e-3, rel=1e-3)
    assert many.bottleneck.utilisation < 1e-3


def test_gathers_of_the_next_slice_run_beside_the_send_until_they_are_the_slowest():
    """Half of a slice comes from the other rank: 5 GB over NVLink, between packing 5 GB and assembling 10 GB."""
    plan = [outline(i, "direct", (TEN, [0, 1]), worker=0) for i in range(3)]
    fast, slow = NETWORK, Network(gpus_per_node=4, nic_gb_s=10, nvlink_gb_s=1, latency_s=0)
    assert replay(plan, fast).seconds == pytest.approx((COPY / 2 + 0.05 + COPY) + 3 + COPY)
    gather_bound = replay(plan, slow)
    assert gather_bound.seconds == pytest.approx(3 * (COPY / 2 + 5 + COPY) + 1 + COPY)
    assert gather_bound.bottleneck.kind == "trainer NVLink"
    # ranks of different nodes gather over their NICs
    far = replay([outline(0, "direct", (TEN, [0, 4]), worker=0)], slow)
    assert far.seconds == pytest.approx((COPY / 2 + 0.5 + COPY) + 1 + COPY)


def test_slices_meet_in_the_engines_node():
    """Two senders, two workers: a slice of 10 GB to each at once, then 10 GB to each from its neighbour."""
    plan = [outline(i, "slices", (TEN, [0]), (TEN, [1])) for i in range(3)]
    fast = replay(plan, tp=2)
    assert fast.seconds == pytest.approx(COPY + 3 + 0.1 + 2 * COPY)
    nvlink_bound = replay(plan, Network(gpus_per_node=4, nic_gb_s=10, nvlink_gb_s=1, latency_s=0), tp=2)
    assert nvlink_bound.seconds == pytest.approx(COPY + 1 + 3 * 10 + 2 * COPY)
    assert nvlink_bound.bottleneck.kind == "engine NVLink"


def test_slices_go_to_every_node_of_a_wide_engine():
    """Two nodes of two: each sender's NIC carries its slice twice, each worker's once."""
    wide = replay([outline(0, "slices", (TEN, [0]), (TEN, [1]))], tp=4, gpus_per_node=2)
    assert wide.seconds == pytest.approx(COPY + 2 + 0.1 + 2 * COPY)
    assert (bytes_of(wide, "trainer NIC out"), bytes_of(wide, "engine NIC in")) == (4 * TEN, 4 * TEN)


def test_an_empty_slice_is_not_sent():
    simulated = replay([outline(0, "slices", (TEN, [0]), (0, [1]))], tp=2)
    assert simulated.seconds == pytest.approx(COPY + 1 + 0.1 + COPY)
    assert bytes_of(simulated, "trainer NIC out") == TEN


def test_a_broadcast_takes_one_nic_however_many_workers_there_are():
    one, many = (replay([outline(0, "broadcast", (TEN, [0]))], tp=tp).seconds for tp in (1, 16))
    assert one == many == pytest.approx(COPY + 1 + COPY)
    two_engines = replay([outline(0, "broadcast", (TEN, [0]), engines=(0, 1))], tp=8, count=2)
    assert two_engines.seconds == pytest.approx(COPY + 2 + COPY)


def test_no_buffers_are_refused():
    with pytest.raises(ValueError, match="buffers is 0"):
        replay([direct(0, 0, 0)], buffers=0)


# -- random plans


def random_plan(seed):
    """(outlines, keyword arguments of EngineLayout) with every mode, shared ranks, several engines and nodes."""
    rng = random.Random(seed)
    engines = {"tp": rng.choice([1, 2, 4, 6]), "count": rng.randint(1, 3), "gpus_per_node": rng.choice([2, 4])}
    node, world = EngineLayout(**engines).node, EngineLayout(**engines).world
    outlines = []
    for index in range(rng.randint(1, 40)):
        mode = rng.choice(["broadcast", "slices", "direct"])
        targets = tuple(sorted(rng.sample(range(engines["count"]), rng.randint(1, engines["count"]))))
        count = node if mode == "slices" else 1
        slices = [(rng.choice([0, 1, GB, TEN]) if mode == "slices" else rng.choice([1, GB, TEN]),
                   rng.sample(range(6), rng.randint(1, 4))) for _ in range(count)]
        outlines.append(outline(index, mode, *slices, engines=targets,
                                worker=rng.randrange(world) if mode == "direct" else None))
    return outlines, engines


@pytest.mark.parametrize("seed", range(40))
def test_random_plans_end_and_every_byte_sent_is_received(seed):
    outlines, engines = random_plan(seed)
    layout = EngineLayout(**engines)
    nodes = layout.world // layout.node
    sent = received = 0
    for one in outlines:
        nbytes = sum(part.nbytes for part in one.slices)
        sent += len(one.engines) * nbytes * (nodes if one.mode == "slices" else 1)
        received += len(one.engines) * nbytes * (1 if one.mode == "direct" else nodes)
    one_node = Network(gpus_per_node=8, nic_gb_s=10, nvlink_gb_s=100, latency_s=1e-5)  # gathers take no NIC
    for buffers in (1, 3):
        simulated = replay(outlines, one_node, buffers, **engines)
        assert bytes_of(simulated, "trainer NIC out") == sent
        assert bytes_of(simulated, "engine NIC in") == received
        assert 0 < simulated.bottleneck.utilisation <= 1 + 1e-9
        assert simulated == replay(outlines, one_node, buffers, **engines)


def test_more_buffers_never_make_a_single_pipeline_slower():
    rng = random.Random(1)
    plan = [outline(i, "direct", (rng.randrange(1, TEN), [0, 1]), worker=0) for i in range(20)]
    times = [replay(plan, buffers=buffers).seconds for buffers in (1, 2, 3, 20)]
    assert times == sorted(times, reverse=True)


# -- the core


def test_two_processes_that_wait_for_each_other_are_a_deadlock():
    clock, first, second = Clock(), Event(), Event()

    def waits(mine, other):
        yield other
        mine.fire()

    clock.start("left", waits(first, second))
    clock.start("right", waits(second, first))
    with pytest.raises(Deadlock, match="2 processes wait for one another, among them left, right"):
        clock.run()


def test_flows_share_a_link_while_they_overlap():
    """10 bytes alone for 0.5 s, then two flows at half speed: the first ends at 1.5 s, the second at 2 s."""
    clock = Clock()
    fabric, link, ended = Fabric(clock), Link("wire", 10.0), {}

    def flow(name, after):
        yield after
        yield fabric.move(10, [link])
        ended[name] = clock.now

    clock.start("first", flow("first", 0.0))
    clock.start("second", flow("second", 0.5))
    assert clock.run() == pytest.approx(2.0)
    assert ended == {"first": pytest.approx(1.5), "second": pytest.approx(2.0)}
    assert link.moved == 20 and not link.flows
