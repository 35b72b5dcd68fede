"""A Hugging Face checkpoint directory into one rank's Megatron parameters, reading only the slices that rank holds."""
from __future__ import annotations

import json
import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Iterator, Mapping, Sequence

import torch
from safetensors import safe_open
from torch import Tensor

from mrl.reshard.params import ParamPlan, duplicates, hf_tensors
from mrl.reshard.pieces import Piece, slices
from mrl.reshard.spec import ModelSpec

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_FLOATS = ("F64", "F32", "F16", "BF16")
# Rotary tables that old versions of transformers saved; they are computed from the config.
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_HARMLESS = re.compile(r"(^|\.)rotary_emb\.inv_freq$")


@torch.no_grad()
def load_hf(path: str | Path, params: Mapping[str, Tensor], plans: Sequence[ParamPlan], spec: ModelSpec) -> None:
    """Fills this rank's `params` (Megatron name -> contiguous shard) in place from the checkpoint at `path`.

    `plans` come from `local_params`. Values are converted to the parameter's dtype; vocabulary padding becomes zero.
    Raises FileNotFoundError when there are no weights, and one ValueError that lists every tensor that is missing,
    unknown or of the wrong shape, before anything is written.
    """
    _check_params(params, plans)
    directory = Path(path)
    file_of = _weight_files(directory)
    with ExitStack() as stack:
        reader = _Reader(directory, file_of, stack)
        problems = [
            *_name_problems(file_of, spec), *_tensor_problems(reader, plans), *_copy_problems(reader, plans, spec),
        ]
        if problems:
            raise ValueError(f"{directory} does not fit its config.json:\n  " + "\n  ".join(problems))
        for plan in plans:
            if plan.padded:
                params[plan.name].zero_()
            for piece in plan.pieces:
                piece.of_local(params[plan.name]).copy_(piece.shaped(reader.read(piece.hf, piece)))


class _Reader:
    """The checkpoint's tensors by name. Files are opened on first use and closed with `stack`."""

    def __init__(self, directory: Path, file_of: Mapping[str, str], stack: ExitStack) -> None:
        self._directory, self._file_of, self._stack = directory, file_of, stack
        self._open: dict[str, Any] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def slice(self, name: str) -> Any:
        """safetensors' handle of one tensor: shape and dtype, and data when indexed."""
        file = self._file_of[name]
        if file not in self._open:
            self._open[file] = self._stack.enter_context(safe_open(self._directory / file, framework="pt"))
        return self._open[file].get_slice(name)

    def read(self, name: str, piece: Piece) -> Tensor:
        """The box of `piece` in tensor `name`, on the CPU, in the file's dtype."""
        return self.slice(name)[slices(piece.hf_index)]


def _weight_files(directory: Path) -> dict[str, str]:
    """Tensor name -> file name, of a single file or of an index."""
    index, single = directory / INDEX_FILE, directory / SINGLE_FILE
    if index.is_file():
        file_of = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        lost = [file for file in sorted(set(file_of.values())) if not (directory / file).is_file()]
        if lost:
            raise FileNotFoundError(f"{index} names files that are not there: {', '.join(lost)}")
        return file_of
    if single.is_file():
        with safe_open(single, framework="pt") as handle:
            return dict.fromkeys(handle.keys(), SINGLE_FILE)
    hint = "; it has .bin weights: convert them to safetensors" if any(directory.glob("*.bin")) else ""
    raise FileNotFoundError(f"model directory {directory} has no weights: neither {SINGLE_FILE} nor {INDEX_FILE}{hint}")


def _check_params(params: Mapping[str, Tensor], plans: Sequence[ParamPlan]) -> None:
    """The live model must have exactly the planned parameters; anything else is a mistake in mrl or in the table."""
    planned = {plan.name: plan.shape for plan in plans}
    actual = {name: tuple(param.shape) for name, param in params.items()}
    problems = [
        f"{name}: planned {planned.get(name, 'not at all')}, the model has {actual.get(name, 'none')}"
        for name in sorted(planned.keys() | actual.keys())
        if planned.get(name) != actual.get(name)
    ]
    if problems:
        raise ValueError("the Megatron model and its family table disagree:\n  " + "\n  ".join(problems))


def _name_problems(file_of: Mapping[str, str], spec: ModelSpec) -> Iterator[str]:
    """Missing and unknown tensors of the whole model, whichever of them this rank holds."""
    expected = hf_tensors(spec).keys()
    yield from (f"missing: {name}" for name in expected if name not in file_of)
    known = {*expected, *duplicates(spec)}
    for name in sorted(file_of.keys() - known):
        if not _HARMLESS.search(name) and not _dropped(name, spec):
            yield f"unknown: {name}"


def _dropped(name: str, spec: ModelSpec) -> bool:
    """Whether it belongs to a multi-token-prediction layer, and these are not kept."""
    layer = _LAYER.match(name)
    return bool(spec.family.mtp and not spec.mtp_layers and layer and int(layer[1]) >= spec.num_layers)


def _tensor_problems(reader: _Reader, plans: Sequence[ParamPlan]) -> Iterator[str]:
    """Wrong shapes and dtypes among the tensors this rank reads."""
    shapes = {piece.hf: piece.hf_shape for plan in plans for piece in plan.pieces if piece.hf in reader}
    for name, shape in shapes.items():
        found = reader.slice(name)
        if tuple(found.get_shape()) != shape:
            yield f"wrong shape: {name} is {tuple(found.get_shape())}, config.json says {shape}"
        if found.get_dtype() not in _FLOATS:
            yield f"wrong dtype: {name} is {found.get_dtype()}, only {', '.join(_FLOATS)} can be loaded"


def _copy_problems(reader: _Reader, plans: Sequence[ParamPlan], spec: ModelSpec) -> Iterator[str]:
    """Where a file holds twice what is one parameter in Megatron, both must be the same."""
    for again, original in duplicates(spec).items():
        if again not in reader or original not in reader:
            continue
        pieces = [piece for plan in plans for piece in plan.pieces if piece.hf in (again, original)]
        if reader.slice(again).get_shape() != reader.slice(original).get_shape() or any(
            not torch.equal(reader.read(again, piece), reader.read(original, piece)) for piece in pieces
        ):
            yield f"unknown: {again} differs from {original}, but Megatron has one parameter for both"
