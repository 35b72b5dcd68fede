"""Megatron shards of all ranks back into a Hugging Face checkpoint: offline, in one process."""
from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from math import prod
from pathlib import Path
from typing import Callable, Iterable, Iterator, Sequence

import torch
from safetensors.torch import save_file
from torch import Tensor

from mrl.reshard.layout import Coord, Layout
from mrl.reshard.load import INDEX_FILE, SINGLE_FILE
from mrl.reshard.params import Column, gather_groups
from mrl.reshard.pieces import Piece
from mrl.reshard.spec import ModelSpec, read_config

MAX_SHARD_BYTES = 5_000_000_000

# What a model directory holds besides weights and config.json.
_SIDE_FILES = (
    "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt",
    "*.model", "*.tiktoken", "chat_template*", "*.jinja", "LICENSE*",
)


def export_tensors(
    spec: ModelSpec, layout: Layout, get_local: Callable[[Coord, str], Tensor], te: bool = False,
) -> Iterator[tuple[str, Tensor]]:
    """Every HF tensor of the model exactly once, assembled on the CPU in the shards' dtype.

    Stage by stage and chunk by chunk they come in model order, experts after all others of their stage and in the order
    of the ranks that hold them; a tensor comes as soon as it is whole.

    `get_local(coord, name)` returns the contiguous shard of a Megatron parameter or buffer (or of anything shaped like
    it, for example its gradient) on the rank at `coord`; it is asked once per plan. ValueError for a shard of another
    shape than planned.
    """
    unfinished: dict[str, tuple[Tensor, int]] = {}  # what is there so far, and the elements that are not
    for group in gather_groups(spec, layout):
        coords = [layout.coord(rank) for rank in group.ranks(0)]
        for number in range(len(group.entries)):
            for piece, values in _leaving(coords, group.column(number, te), get_local):
                if piece.hf not in unfinished:
                    unfinished[piece.hf] = torch.empty(piece.hf_shape, dtype=values.dtype), prod(piece.hf_shape)
                tensor, missing = unfinished.pop(piece.hf)
                piece.of_hf(tensor).copy_(values)
                if missing == piece.numel:
                    yield piece.hf, tensor
                else:
                    unfinished[piece.hf] = tensor, missing - piece.numel


@torch.no_grad()
def _leaving(
    coords: Sequence[Coord], column: Column, get_local: Callable[[Coord, str], Tensor],
) -> Iterator[tuple[Piece, Tensor]]:
    """The pieces of one parameter that leave, with their values."""
    for coord, param in zip(coords, column, strict=True):
        leaving = [piece for piece in param.pieces if piece.leaves]
        if not leaving:
            continue
        shard = get_local(coord, param.name)
        if tuple(shard.shape) != param.shape:
            raise ValueError(f"{param.name} on tp {coord.tp}, pp {coord.pp}, dp {coord.dp} is {tuple(shard.shape)}, "
                             f"expected {param.shape}")
        for piece in leaving:
            yield piece, piece.of_local(shard)


def save_hf(
    tensors: Iterable[tuple[str, Tensor]], source_dir: str | Path, out_dir: str | Path,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Path:
    """Writes `tensors` as a Hugging Face model directory that transformers and the engines load.

    Weights go into safetensors files of at most `max_shard_bytes` (a larger tensor gets its own), with an index when
    there are several. config.json, with the dtype of the written weights, tokenizer, chat template and generation
    config come from `source_dir`. The directory appears whole or not at all. FileExistsError when `out_dir` exists and
    is not an empty directory.
    """
    out = Path(out_dir)
    config = read_config(source_dir)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(f"{out} exists and is not empty: choose another output directory or remove it")
    partial = out.parent / f".{out.name}.partial-{os.getpid()}"
    partial.mkdir(parents=True)
    try:
        dtype = _write_weights(tensors, partial, max_shard_bytes)
        _write_config(config, dtype, partial)
        for pattern in _SIDE_FILES:
            for file in Path(source_dir).glob(pattern):
                shutil.copy(file, partial / file.name)
        partial.rename(out)
    except BaseException:
        shutil.rmtree(partial)
        raise
    return out


def _write_weights(tensors: Iterable[tuple[str, Tensor]], directory: Path, max_bytes: int) -> torch.dtype:
    """Streams tensors into numbered files, holding one file's worth in memory; returns the dtype of most elements."""
    shard_of: dict[str, int] = {}
    dtypes: Counter[torch.dtype] = Counter()
    total = count = 0
    for count, shard in enumerate(_shards(tensors, max_bytes), start=1):
        again = sorted(shard.keys() & shard_of.keys())
        if again:
            raise ValueError(f"exported twice: {', '.join(again)}")
        save_file(shard, directory / _part(count), metadata={"format": "pt"})
        shard_of.update(dict.fromkeys(shard, count))
        for tensor in shard.values():
            dtypes[tensor.dtype] += tensor.numel()
        total += sum(tensor.nbytes for tensor in shard.values())
    if not count:
        raise ValueError("no tensors to export")
    final = {i: SINGLE_FILE if count == 1 else f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)}
    for i, name in final.items():
        (directory / _part(i)).rename(directory / name)
    if count > 1:
        index = {"metadata": {"total_size": total}, "weight_map": {name: final[i] for name, i in shard_of.items()}}
        (directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return dtypes.most_common(1)[0][0]


def _part(number: int) -> str:
    """Name of a weight file while the number of files is not known yet."""
    return f"part-{number}.safetensors"


def _shards(tensors: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Consecutive tensors of at most `max_bytes` together (or one that alone has more)."""
    shard: dict[str, Tensor] = {}
    filled = 0
    for name, tensor in tensors:
        if name in shard:
            raise ValueError(f"exported twice: {name}")
        if shard and filled + tensor.nbytes > max_bytes:
            yield shard
            shard, filled = {}, 0
        shard[name] = tensor.detach().cpu().contiguous()
        filled += tensor.nbytes
    if shard:
        yield shard


def _write_config(config: dict, dtype: torch.dtype, directory: Path) -> None:
    """config.json as it was, except that it names the dtype the weights now have."""
    key = "dtype" if "dtype" in config else "torch_dtype"  # transformers 5 writes dtype, and reads both
    config = {**config, key: str(dtype).removeprefix("torch.")}
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
