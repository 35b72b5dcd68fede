"""Tracing finds the loader's copies and changes nothing; what is more than a copy, it says."""
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from mrl.receiver.mrl_receiver.trace import TraceError, trace
from tests.receiver.toy import DENSE, SHAPES, ToyModel, ToyMoe, parameter


def kinds(shapes=DENSE, dtype=torch.float32):
    return {name: (tuple(shape), dtype) for name, shape in shapes.items()}


def lattices(traced):
    return {name: [home.lattice for home in homes] for name, homes in traced.homes.items()}


@pytest.mark.parametrize("rank", [0, 1])
def test_every_element_is_found_and_nothing_is_written(rank):
    model = ToyMoe(rank, tp=2)
    before = {name: p.clone() for name, p in model.state_dict().items()}
    traced = trace(kinds(SHAPES), model, model.load_weights)
    assert all(torch.equal(before[name], p) for name, p in model.state_dict().items()), "tracing wrote something"
    assert traced.untouched(model) == []
    mine = range(2 * rank, 2 * rank + 2)
    assert lattices(traced) == {
        "embed": [(0, (5, 4), (4, 1))], "q": [(12 * rank, (2, 6), (6, 1))], "k": [(6 * rank, (1, 6), (6, 1))],
        "norm": [(0, (6,), (1,))], "o": [(4 * rank, (6, 4), (8, 1))], "base": [(0, (4, 3), (3, 1))],
        **{f"experts.{e}.{kind}": [(0, (4, 6), (6, 1))] for e in mine for kind in ("gate", "up")},
        **{f"experts.{e}.down": [(0, (6, 4), (4, 1))] for e in mine}}
    assert traced.fills.keys() == {"embed"}
    up = traced.homes[f"experts.{mine[1]}.up"][0].target
    assert (up.data_ptr(), up.shape) == (model.w13[1, 4:].data_ptr(), (4, 6))


def test_what_is_more_than_a_copy_is_opaque_with_all_that_it_needs_in_one_call():
    model = ToyMoe()
    traced = trace(kinds(SHAPES), model, model.load_weights)
    assert traced.opaque.keys() == {"flipped", "pair.a", "pair.b"}
    assert all("converts what it copies" in reason for reason in traced.opaque.values())
    assert traced.together == {"flipped": {"flipped"}, "pair.a": {"pair.a", "pair.b"}, "pair.b": {"pair.a", "pair.b"}}


def test_a_loader_that_takes_everything_before_it_works_is_traced_the_same():
    model = ToyMoe(1, 2)
    lazily = trace(kinds(SHAPES), model, model.load_weights)
    eagerly = trace(kinds(SHAPES), model, lambda named: model.load_weights(list(named)))
    assert lattices(eagerly) == lattices(lazily) and eagerly.together == lazily.together


def test_a_loader_that_works_in_threads_is_traced_the_same():
    model = ToyMoe(1, 2)

    def load(named):
        with ThreadPoolExecutor() as pool:
            for future in [pool.submit(model.load_weights, [one]) for one in named if not one[0].startswith("pair")]:
                future.result()

    in_threads = trace(kinds(SHAPES), model, load)
    assert lattices(in_threads) == lattices(trace(kinds(SHAPES), model, model.load_weights))
    assert all((parameter == -9).all() for parameter in model.parameters())
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(threading.get_ident).result() != threading.get_ident(), "pools are as they were"


@pytest.mark.parametrize("shapes, words", [
    ({"embed": (4, 5)}, "embed of shape [4, 5]: AssertionError: vocabulary"),
    ({"norm": (7,)}, "norm of shape [7]"),
    ({"typo": (3,)}, "typo of shape [3]: KeyError"),
])
def test_a_tensor_the_loader_refuses_is_named(shapes, words):
    model = ToyModel()
    with pytest.raises(TraceError) as caught:
        trace(kinds({"q": (4, 6), **shapes}), model, model.load_weights)
    assert words in str(caught.value)


def test_a_narrower_engine_is_refused_and_a_wider_one_is_not():
    narrow, wide = ToyModel(dtype=torch.bfloat16), ToyModel()
    with pytest.raises(TraceError, match="embed is sent as torch.float32.*torch.bfloat16 in embed.*model.dtype"):
        trace(kinds(), narrow, narrow.load_weights)
    assert not trace(kinds(dtype=torch.bfloat16), wide, wide.load_weights).opaque


@pytest.mark.parametrize("sent, held", [(torch.float8_e4m3fn, torch.bfloat16), (torch.bfloat16, torch.float8_e4m3fn)])
def test_fp8_is_for_engines_that_hold_fp8_alone(sent, held):
    """Of itself a copy between the two would do, with values that mean nothing without their scales."""
    model, like = ToyModel(dtype=held), ToyModel(dtype=sent)
    with pytest.raises(TraceError, match=f"embed is sent as {sent}.*holds it as {held}.*rollout.quantization"):
        trace(kinds(dtype=sent), model, model.load_weights)
    assert not trace(kinds(dtype=sent), like, like.load_weights).opaque


def test_parameters_left_out_are_named_and_tied_ones_and_buffers_are_not():
    model = ToyMoe()
    traced = trace(kinds({name: shape for name, shape in SHAPES.items() if name not in ("norm", "pair.b", "pair.a")}),
                   model, model.load_weights)
    assert traced.untouched(model) == ["norm", "pair"]


class Weight(torch.nn.Module):
    """One parameter, loaded as the test says."""

    def __init__(self, load, *shape):
        super().__init__()
        self.weight, self.load = parameter(*shape), load

    def load_weights(self, named):
        for _, tensor in named:
            self.load(self.weight.data, tensor)


@pytest.mark.parametrize("load, shape, words", [
    (lambda weight, tensor: (weight.zero_(), weight.add_(tensor.t())), (6, 4), "add_"),
    (lambda weight, tensor: weight.copy_(tensor[0]), (4, 6), "repeats elements"),
    (lambda weight, tensor: weight.fill_(tensor.sum().item()), (4, 6), "reads single values"),
    (lambda weight, tensor: weight.copy_(torch.zeros(4, 6).copy_(tensor)), (4, 6), "converts"),
])
def test_other_loaders_that_cannot_be_replayed(load, shape, words):
    model = Weight(load, *shape)
    traced = trace(kinds({"q": (4, 6)}), model, model.load_weights)
    assert words in traced.opaque["q"] and not traced.homes and not traced.fills


def test_a_transposing_view_is_a_copy_with_other_strides():
    model = Weight(lambda weight, tensor: weight.copy_(tensor.t()), 6, 4)
    assert lattices(trace(kinds({"q": (4, 6)}), model, model.load_weights)) == {"q": [(0, (6, 4), (1, 6))]}
