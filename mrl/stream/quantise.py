"""Quantising slices into blockwise fp8, on their sender. Layout and names are in `mrl/reshard/fp8.py`."""
from __future__ import annotations

import torch
from torch.nn.functional import pad

from mrl.reshard.fp8 import BLOCK

LARGEST = torch.finfo(torch.float8_e4m3fn).max
"""448: what a block's element of largest magnitude becomes."""
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""Of blocks of zeros, and of those whose scale would lose bits: weights around 1e-36."""
CHUNK_ELEMENTS = 1 << 24
"""Worked on at once, in float32."""


def quantise(weights: torch.Tensor, values: torch.Tensor, scales: torch.Tensor) -> None:
    """Write `weights`, [rows, columns] of any float dtype, as `values`, e4m3 of the same shape, and `scales`, float32
    [⌈rows / 128⌉, ⌈columns / 128⌉].

    A block's scale is its largest magnitude / 448, and a value is weight / scale, rounded to the nearest e4m3, halves
    to even: weights come back as value * scale with an error of at most 1/16 of each, or 1/1024 of the scale. All of it
    is elementwise IEEE arithmetic, so CPUs and GPUs agree in every bit. A NaN or an infinity makes NaN of its block.
    """
    rows, columns = weights.shape
    step = max(1, CHUNK_ELEMENTS // (columns * BLOCK)) * BLOCK
    for start in range(0, rows, step):
        chunk = weights[start:start + step]
        height = len(chunk)
        padded = pad(chunk, (0, -columns % BLOCK, 0, -height % BLOCK)).float()
        blocks = padded.view(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
        scale = (blocks.abs().amax((1, 3), keepdim=True) / LARGEST).clamp_(min=SMALLEST_SCALE)
        whole = (blocks / scale).to(torch.float8_e4m3fn).view(padded.shape)
        values[start:start + height].copy_(whole[:height, :columns])
        scales[start // BLOCK:][:len(scale)].copy_(scale[:, 0, :, 0])
