"""Blockwise fp8, as DeepSeek-V3 and Qwen3 publish it: which tensors, their scales, and how both travel.

A tensor W of rows x columns is made of blocks of 128 x 128, smaller at its edges. It becomes W in e4m3, and
`<W>_scale_inv` in float32 with one scale a block; the weight is e4m3 times the scale of its block. Projections of
attention, MLPs and experts are quantised, all else is not: embeddings, norms, biases, routers, the output.

Only where whole blocks lie together can they be quantised, so boxes of W begin and end at blocks. In a slice that is
sent lie first the boxes' e4m3, one behind the other, and then, from the next multiple of 4 bytes on, all scales.
What the bytes in between are means nothing.
What computes is in `mrl/stream/quantise.py`; nothing here needs torch.
"""
from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any, Iterator, NamedTuple, Sequence

from mrl.reshard.boxes import Box, numel, sizes
from mrl.reshard.buckets import Part
from mrl.reshard.engine_layout import EngineLayout, held_boxes
from mrl.reshard.layout import Layout
from mrl.reshard.params import gather_groups
from mrl.reshard.pieces import HfTensor, Shape, gate_up, qkv
from mrl.reshard.spec import ModelSpec

BLOCK = 128
VALUES, SCALES = "float8_e4m3fn", "float32"
"""Dtypes of the two tensors that a quantised one becomes."""

_SUFFIX = "_scale_inv"
_SCALE_BYTES = 4


def scales_name(tensor: str) -> str:
    """HF name of the scales of a tensor."""
    return tensor + _SUFFIX


def quantised_name(name: str) -> str:
    """HF name of the tensor that `name` is, or has the scales of."""
    return name.removesuffix(_SUFFIX)


def blocks(box: Box) -> Box:
    """The box of scales that belongs to a box of a tensor."""
    return tuple((start // BLOCK, -(-stop // BLOCK)) for start, stop in box)


def scales_shape(shape: Shape) -> Shape:
    """Shape of the scales of a tensor."""
    return tuple(-(-size // BLOCK) for size in shape)


def of_whole_blocks(box: Box, shape: Shape) -> bool:
    """Whether a box of a tensor of this shape cuts through no block."""
    return all(start % BLOCK == 0 and (stop % BLOCK == 0 or stop == size) for (start, stop), size in zip(box, shape))


class Places(NamedTuple):
    """Bytes at which the values and the scales of each box begin in a slice, and bytes of the slice."""

    values: list[int]
    scales: list[int]
    nbytes: int


def places(boxes: Sequence[Box]) -> Places:
    """How boxes lie in a slice that is sent."""
    *values, end = accumulate(map(numel, boxes), initial=0)
    first = -(-end // _SCALE_BYTES) * _SCALE_BYTES
    *scales, nbytes = accumulate((_SCALE_BYTES * numel(blocks(box)) for box in boxes), initial=first)
    return Places(values, scales, nbytes)


def sent_parts(parts: Sequence[Part]) -> tuple[Part, ...]:
    """What the parts of a slice become: the values of all, then the scales of all."""
    at = places([part.box for part in parts])
    values = [replace(part, offset=offset, dtype=VALUES) for part, offset in zip(parts, at.values)]
    scales = [Part(scales_name(part.name), scales_shape(part.shape), blocks(part.box), offset, SCALES)
              for part, offset in zip(parts, at.scales)]
    return (*values, *scales)


def quantization_config(spec: ModelSpec) -> dict[str, Any]:
    """`quantization_config` of config.json for engines that get this model's weights in blockwise fp8."""
    plain = [tensor.name.removesuffix(".weight") for tensor in _tensors(spec, fp8=False) if len(tensor.shape) == 2]
    return {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": plain}


def fp8_problems(spec: ModelSpec) -> list[str]:
    """Why this model cannot be quantised, one sentence each; empty when it can."""
    stacked = [tensor.name for tensor in _tensors(spec, fp8=True) if len(tensor.shape) != 2]
    return [f"fp8 needs matrices, and {stacked[0]} of {spec.family.model_type} stacks experts"] if stacked else []


def engine_problems(spec: ModelSpec, engines: EngineLayout) -> list[str]:
    """Why engines laid out like this refuse this model in fp8, one sentence a kind of projection; empty when they take
    it. Between their workers, and between projections that they fuse, blocks stay whole."""
    problems: dict[str, str] = {}
    for group in gather_groups(spec, Layout(), fp8=True):
        for number, entry in enumerate(group.entries if group.fp8 else ()):
            fused = entry.rule.te_kind in (qkv, gate_up)
            for at, tensor in enumerate(group.tensors(number)):
                boxes = held_boxes(entry.rule, at, tensor.shape, entry.expert, spec, engines, worker=0) or ()
                for box in boxes:
                    rows, columns = sizes(box)
                    if not of_whole_blocks(box, tensor.shape) or fused and rows % BLOCK:
                        kind = tensor.name.split(".")[-2]
                        problems[kind] = f"{kind} in parts of {rows} x {columns}"
    return [*problems.values()]


def _tensors(spec: ModelSpec, fp8: bool) -> Iterator[HfTensor]:
    """The tensors that are quantised, or those that are not."""
    for group in gather_groups(spec, Layout(), fp8=True):
        if group.fp8 == fp8:
            for number in range(len(group.entries)):
                yield from group.tensors(number)
