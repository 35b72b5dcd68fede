"""Packed changes on a GPU: the messages of the CPU, and what they make of a slice there."""
import pytest
import torch

from mrl.receiver.mrl_receiver.delta import pack, unpack

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("share", [0.0, 1e-5, 0.001, 0.03, 0.3, 1.0])
def test_messages_are_those_of_the_cpu(gpus, dtype, share):
    gpus(1)
    generator = torch.Generator().manual_seed(1)
    old, new = torch.randint(0, 256, (2, 999_999, dtype.itemsize), dtype=torch.uint8, generator=generator)
    changed = torch.rand(len(old), generator=generator) < share
    new = torch.where(changed[:, None], new, old)
    old, new = old.view(-1).view(dtype), new.view(-1).view(dtype)
    expected, found = pack(new, old), pack(new.cuda(), old.cuda())
    if expected is None:
        assert found is None and share > 0.5
        return
    assert found[0] == expected[0] and torch.equal(found[1].cpu(), expected[1])
    made = old.cuda()
    unpack(*found, made)
    assert torch.equal(made.cpu().view(torch.uint8), new.view(torch.uint8))
