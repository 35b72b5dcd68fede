"""Packed changes: whatever has changed, and whatever bits it has, comes out as it was and takes less than the slice."""
import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from mrl.receiver.mrl_receiver import delta
from mrl.receiver.mrl_receiver.delta import BITMAP, GAPS_1, GAPS_2, GAPS_4, HEADER, WHOLE, Header, pack, unpack, whole

DTYPES = [torch.float32, torch.bfloat16, torch.uint8, torch.float64]
SPECIAL = [float("nan"), -0.0, 0.0, float("inf"), -float("inf")]


def random_bits(numel: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Any bits: NaNs with any payload among them."""
    return torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator).view(dtype)


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.uint8)


def through(old: torch.Tensor, new: torch.Tensor) -> Header:
    """Pack, take the message apart as a receiver does, and see that it makes `new` of `old`, and no more."""
    message = pack(new, old)
    if message is None:
        return whole(new)
    header, payload = message
    assert header.nbytes == payload.numel() < new.nbytes
    read = Header.read(torch.tensor(header), new.numel(), new.itemsize)
    assert read == header
    made = old.clone()
    unpack(read, payload.clone(), made)
    assert torch.equal(bits(made), bits(new))
    return header


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_change_of_any_bits_arrives(data):
    dtype = data.draw(st.sampled_from(DTYPES))
    numel = data.draw(st.integers(1, 5000))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    share = data.draw(st.sampled_from([0.0, 0.0005, 0.01, 0.1, 0.3, 0.6, 1.0]))
    old = random_bits(numel, dtype, generator)
    changed = torch.rand(numel, generator=generator) < share
    new = old.clone()
    bits(new).view(numel, -1)[changed] = bits(random_bits(numel, dtype, generator)).view(numel, -1)[changed]
    through(old, new)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9_999), st.sampled_from(SPECIAL)), max_size=30),
       st.sampled_from([torch.float32, torch.bfloat16]))
def test_signed_zeros_and_infinities_are_changes_and_equal_nans_are_none(changes, dtype):
    old = torch.zeros(10_000, dtype=dtype)
    old[::3] = float("nan")
    new = old.clone()
    for index, value in changes:
        new[index] = value
    header = through(old, new)
    assert header.kind != WHOLE and (changes or header == (header.kind, 0, 0))
    assert header.entries <= len(changes) + 10_000 // 256


@pytest.mark.parametrize("share, kind, at_most", [
    (0.0, None, 0.0), (1e-5, None, 1e-4), (0.001, None, 0.006), (0.03, GAPS_1, 0.05), (0.3, BITMAP, 0.37),
    (1.0, WHOLE, 1.0)])
def test_the_smallest_form_is_taken(share, kind, at_most):
    generator = torch.Generator().manual_seed(1)
    old = torch.randn(1_000_000, generator=generator).bfloat16()
    changed = torch.rand(len(old), generator=generator) < share
    new = torch.where(changed, old + 1.0, old)
    header = through(old, new)
    assert kind in (None, header.kind) and header.nbytes <= at_most * new.nbytes, header


def test_lone_changes_far_apart_take_the_bytes_that_their_distance_needs():
    old = torch.zeros(400_000, dtype=torch.uint8)
    for step, kind in ((200, GAPS_1), (3_000, GAPS_2), (399_999, GAPS_4)):
        new = old.clone()
        new[::step] = 1
        assert through(old, new).kind == kind


def test_chunks_do_not_show(monkeypatch):
    generator = torch.Generator().manual_seed(1)
    old = torch.randn(10_001, generator=generator)
    new = torch.where(torch.rand(10_001, generator=generator) < 0.4, -old, old)
    monkeypatch.setattr(delta, "CHUNK_ELEMENTS", 1000)
    assert through(old, new).kind == BITMAP


@pytest.mark.parametrize("numbers", [(9, 0, 0), (WHOLE, 0, 399), (GAPS_1, -1, 8), (GAPS_1, 101, 512), (BITMAP, 3, 27),
                                     (-1, -1, -1), (BITMAP, 99, 2**60)])
def test_a_header_that_cannot_be_is_refused(numbers):
    with pytest.raises(ValueError, match="no slice of 100 elements of 4 bytes"):
        Header.read(torch.tensor(numbers), 100, 4)


def test_a_payload_that_cannot_be_is_refused():
    old = torch.zeros(1000)
    for step, kind in ((100, GAPS_1), (3, BITMAP)):
        new = old.clone()
        new[::step] = 1
        header, payload = pack(new, old)
        assert header.kind == kind
        payload[:len(payload) // 50 + 1] = 255
        with pytest.raises(ValueError, match="a message says"):
            unpack(header, payload, old.clone())


def test_headers_are_as_long_as_they_travel():
    assert len(whole(torch.zeros(3))) == HEADER
