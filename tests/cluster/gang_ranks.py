"""Run by torchrun on 4 ranks: orders reach every rank in turn, a batch reaches the right replica."""
import time

import pytest
import torch.distributed as dist

from mrl.cluster import gang
from mrl.reshard.layout import Layout


def check_orders(rank: int) -> None:
    orders = gang.Orders(rank)

    def slow(beat):
        for _ in range(4):
            beat()
            time.sleep(0.1)
        return ["push", 0]

    assert orders.exchange(slow if rank == 0 else None, timeout_s=300) == ["push", 0]
    for i in range(5):
        assert orders.exchange((lambda beat, i=i: i) if rank == 0 else None, timeout_s=300) == i
    dist.barrier()  # the store ends with rank 0's `orders`


def check_silence(rank: int) -> None:
    """Whoever hears nothing from rank 0 gives up: at the order's own deadline, or sooner, when heartbeats stay away."""
    gang.WAIT_SLICE_S = 0.1
    for heartbeat_s, timeout_s, words in ((60, 0.5, "no order from rank 0 within"), (0.5, 30, "heard nothing from")):
        gang.HEARTBEAT_TIMEOUT_S = heartbeat_s
        orders = gang.Orders(rank)
        if rank:
            with pytest.raises(TimeoutError, match=words):
                orders.exchange(None, timeout_s)
        dist.barrier()  # the store ends with rank 0's `orders`


def check_scatter(rank: int) -> None:
    layout = Layout(tp=1, pp=2, dp=2)
    scatter = gang.Scatter(layout, rank)
    for turn in range(2):
        shares = [f"replica {d} turn {turn}" for d in range(2)] if rank == 0 else None
        share = f"replica {layout.coord(rank).dp} turn {turn}"
        assert scatter(shares) == share
        assert scatter.gather(share) == shares


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for check in (check_orders, check_silence, check_scatter):
        check(dist.get_rank())
    dist.barrier()
