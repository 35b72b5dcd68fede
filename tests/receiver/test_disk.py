"""Weights through files: what lies in them, who reads them, and what is left of them when something goes wrong."""
import resource
import threading
import time

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from mrl.receiver.mrl_receiver.disk import DiskTransport, discard
from mrl.receiver.mrl_receiver.links import Label, LinkError, Meeting, failed_key
from mrl.receiver.mrl_receiver.wire import Part

PARTS = (Part("norm.weight", (6,), ((0, 6),), 0), Part("up.weight", (8, 4), ((2, 5), (0, 4)), 6),
         Part("scale", (), (), 18))
LABEL = Label("7/3.0", PARTS)


class Link:
    """Rank 0 sends, the others receive; the store is in this process."""

    def __init__(self, folder, world: int = 3, name: str = "link", store=None):
        self.store = store or dist.HashStore()
        self.ranks = [DiskTransport(Meeting(self.store, "127.0.0.1", name, "p2p", rank, world, torch.device("cpu"),
                                            folder if rank == 0 else None), soon()) for rank in range(world)]


def soon(seconds: float = 300.0) -> float:
    return time.monotonic() + seconds


def values(dtype=torch.bfloat16) -> torch.Tensor:
    return torch.arange(1, 20, dtype=dtype)


def files(folder) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_a_file_holds_the_tensors_by_name_and_reaches_every_worker_bit_for_bit(tmp_path, dtype):
    sender, *workers = Link(tmp_path).ranks
    flats = [torch.zeros(19, dtype=dtype) for _ in workers]
    arriving = [worker.broadcast(flat, soon()) for worker, flat in zip(workers, flats)]
    sent = values(dtype)
    sender.broadcast(sent, soon(), LABEL).wait(soon())
    sent.zero_()  # the buffer is free again, whether or not anybody has read the file
    for transfer, flat in zip(arriving, flats):
        transfer.wait(soon())
        assert torch.equal(flat, values(dtype))
    assert files(tmp_path) == ["7/3.0.safetensors"]
    held = load_file(tmp_path / "7/3.0.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in held.items()} == {
        "norm.weight": (6,), "up.weight[2:5,0:4]": (3, 4), "scale": ()}
    assert torch.equal(held["up.weight[2:5,0:4]"].view(-1), values(dtype)[6:18])


def test_a_file_of_bytes_holds_tensors_of_their_own_dtypes(tmp_path):
    sender, worker = Link(tmp_path, 2).ranks
    parts = (Part("w", (4, 8), ((0, 4), (0, 8)), 0, "float8_e4m3fn"),
             Part("w_scale_inv", (3,), ((1, 3),), 32, "float32"))
    sent, flat = torch.arange(40, dtype=torch.uint8), torch.zeros(40, dtype=torch.uint8)
    arriving = worker.broadcast(flat, soon())
    sender.broadcast(sent, soon(), Label("8/0", parts)).wait(soon())
    arriving.wait(soon())
    assert torch.equal(flat, sent)
    held = load_file(tmp_path / "8/0.safetensors")
    assert {name: tensor.dtype for name, tensor in held.items()} == {
        "w": torch.float8_e4m3fn, "w_scale_inv[1:3]": torch.float32}
    assert torch.equal(held["w_scale_inv[1:3]"].view(torch.uint8), sent[32:])


def test_engines_share_a_file(tmp_path):
    store = dist.HashStore()
    links = [Link(tmp_path, 2, f"link/{engine}", store) for engine in range(2)]
    for number in range(3):
        for link in links:
            link.ranks[0].send(values() * number, 1, soon(), Label(f"0/{number}", PARTS))
    assert files(tmp_path) == [f"0/{number}.safetensors" for number in range(3)]
    written = (tmp_path / "0/0.safetensors").stat().st_mtime_ns
    for link in links:
        for number in range(3):
            flat = torch.zeros(19, dtype=torch.bfloat16)
            link.ranks[1].receive(flat, 0, soon()).wait(soon())
            assert torch.equal(flat, values() * number)
    assert (tmp_path / "0/0.safetensors").stat().st_mtime_ns == written
    assert not any(store.check([f"link/{engine}/p2p/0/1/0"]) for engine in range(2)), "announcements pile up"


def test_a_message_that_is_no_weights(tmp_path):
    sender, worker = Link(tmp_path, 2).ranks
    sums = torch.tensor([5, -(2 ** 60), 7])
    sender.send(sums, 1, soon(), Label("0/sums")).wait(soon())
    got = torch.zeros(3, dtype=torch.int64)
    worker.receive(got, 0, soon()).wait(soon())
    assert torch.equal(got, sums)


def test_a_full_disk_fails_the_link_with_path_and_cause_and_heals(tmp_path):
    sender, worker = Link(tmp_path, 2).ranks
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        large = torch.zeros(100_000)
        with pytest.raises(LinkError, match=r"cannot write .*/7/big.safetensors: .*File too large"):
            sender.send(large, 1, soon(), Label("7/big"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert files(tmp_path) == [], "half a file is left"
    sender.close()
    with pytest.raises(LinkError, match="a peer gave it up"):
        worker.receive(torch.zeros(100_000), 0, soon()).wait(soon())
    sender, worker = Link(tmp_path, 2, "link/next").ranks
    sender.send(large + 1, 1, soon(), Label("8/big"))
    worker.receive(large, 0, soon()).wait(soon())
    assert large.unique().tolist() == [1.0]


def test_waiting_ends_at_the_deadline_or_when_a_peer_gives_up(tmp_path):
    link = Link(tmp_path, 2)
    flat = torch.zeros(4)
    with pytest.raises(LinkError, match="timed out"):
        link.ranks[1].receive(flat, 0, soon()).wait(soon(0.1))
    threading.Timer(0.2, lambda: link.store.set(failed_key("link"), "1")).start()
    with pytest.raises(LinkError, match="a peer gave it up"):
        link.ranks[1].receive(flat, 0, soon()).wait(soon())


@pytest.mark.parametrize("buffer, why", [(torch.zeros(19), "elements of torch.bfloat16 at 0 do not fit"),
                                         (torch.zeros(17, dtype=torch.bfloat16), "12 elements .* at 6 do not fit")])
def test_a_file_that_does_not_fit_the_buffer_is_an_error(tmp_path, buffer, why):
    sender, worker = Link(tmp_path, 2).ranks
    sender.send(values(), 1, soon(), LABEL)
    with pytest.raises(LinkError, match=f"cannot read .*3.0.safetensors: .*{why}"):
        worker.receive(buffer, 0, soon()).wait(soon())


def test_a_file_that_the_engine_cannot_see(tmp_path):
    sender, worker = Link(tmp_path, 2).ranks
    sender.send(values(), 1, soon(), LABEL)
    discard(tmp_path / "7")
    with pytest.raises(LinkError, match="does not appear: is the directory shared?"):
        worker.receive(values(), 0, soon()).wait(soon(0.1))


def test_an_open_file_outlives_its_removal_and_removing_twice_is_no_error(tmp_path):
    sender, worker = Link(tmp_path, 2).ranks
    sender.send(values(), 1, soon(), LABEL)
    flat = torch.zeros(19, dtype=torch.bfloat16)
    worker.receive(flat, 0, soon()).wait(soon())
    discard(tmp_path / "7")
    discard(tmp_path / "7")
    assert files(tmp_path) == [] and torch.equal(flat, values())
