"""What both ends of a link know without bytes: whether it has been given up, and which transports there are."""
import torch
import torch.distributed as dist

from mrl.config.schema import Sync
from mrl.receiver.mrl_receiver.links import Meeting
from mrl.receiver.mrl_receiver.transports import TRANSPORTS


def meeting(store, link: str = "link", part: str = "0") -> Meeting:
    return Meeting(store, "127.0.0.1", link, part, rank=1, world_size=2, device=torch.device("cpu"))


def test_one_who_gives_up_tells_every_communicator_of_the_link_and_no_other():
    store = dist.HashStore()
    first, second, other = meeting(store), meeting(store, part="p2p"), meeting(store, link="another")
    assert first.given_up() is None
    first.give_up()
    assert first.given_up() == second.given_up() == "a peer gave it up"
    assert other.given_up() is None


def test_a_store_that_is_gone_ends_the_link():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    here = meeting(dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False))
    assert here.given_up() is None
    del server
    assert "the weight store is gone" in here.given_up()
    here.give_up()  # nobody to tell; no error


def test_every_transport_can_be_chosen():
    for name in TRANSPORTS:
        assert Sync(transport=name).transport == name
