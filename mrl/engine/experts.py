"""The experts that an engine chose for each token, as its answers give them.

Of a sample of T tokens, prompt included, engines tell those of the first T - 1: the last was sampled, but never read.
"""
from __future__ import annotations

import base64
import io

import numpy as np

from mrl.reshard.spec import ModelSpec


def from_npy(text: str) -> np.ndarray:
    """vLLM's form: a NumPy file of [tokens, layers, experts a token], in base64."""
    return np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)


def from_int32(text: str, spec: ModelSpec) -> np.ndarray:
    """SGLang's form: the elements of [tokens, layers, experts a token] as int32, in base64."""
    return np.frombuffer(base64.b64decode(text), np.int32).reshape(-1, spec.num_layers, spec.moe.top_k)


def checked(chosen: np.ndarray | None, tokens: int, spec: ModelSpec, engine: int) -> np.ndarray:
    """int16 [tokens - 1, layers with experts, experts a token] from the engine's answer for a sample of `tokens`.

    Raises:
        RuntimeError: no answer, one of another shape, or one that no router can have given.
    """
    shape = (tokens - 1, spec.num_layers, spec.moe.top_k)
    if chosen is None or chosen.shape != shape:
        raise RuntimeError(f"engine {engine} was to name the experts of each token, shape {shape}, and answered "
                           f"{'nothing' if chosen is None else chosen.shape}; set trainer.moe_routing: own")
    chosen = chosen[:, spec.moe.dense_layers:].astype(np.int16)
    ordered = np.sort(chosen, axis=-1)
    if chosen.size and (ordered.min() < 0 or ordered.max() >= spec.moe.num_experts
                        or (ordered[..., 1:] == ordered[..., :-1]).any()):
        raise RuntimeError(f"engine {engine} named experts outside 0 to {spec.moe.num_experts - 1}, or one twice for a "
                           "token; set trainer.moe_routing: own")
    return chosen
