"""Where the engines' workers stand, and which box of each Hugging Face tensor every one of them holds. Data, no engine.

vLLM and SGLang cut the same way, and differ in how they count workers:

    vLLM     W = tp * dp; worker = dp index * tp + tp index. Attention and MLPs are cut over tp, and repeated over dp.
    SGLang   W = tp; attention is cut over tp / dp, and repeated over dp; MLPs are cut over tp.

Experts are dealt in blocks over ep, and each is cut over the W / ep workers of its block.
"""
from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Literal

Engine = Literal["vllm", "sglang"]


@dataclass(frozen=True, slots=True)
class EngineLayout:
    """`count` engines of one kind and their parallel sizes, with the names and the meaning the engine itself gives them.

    `ep`: parts into which the experts of a layer are divided: 1 (each expert is cut over all workers) or, as vLLM's
    --enable-expert-parallel has it, all workers. SGLang allows sizes between. `dp`: attention data parallelism.
    `gpus_per_node`: of the engines' nodes; the workers of an engine fill nodes one after the other.
    ValueError for a size below 1, or for sizes that do not divide.
    """

    engine: Engine = "vllm"
    count: int = 1
    tp: int = 1
    ep: int = 1
    dp: int = 1
    gpus_per_node: int = 8

    def __post_init__(self) -> None:
        for name in ("count", "tp", "ep", "dp", "gpus_per_node"):
            if getattr(self, name) < 1:
                raise ValueError(f"engine layout: {name} is {getattr(self, name)}, but must be at least 1")
        if self.engine == "sglang" and self.tp % self.dp:
            raise ValueError(f"engine layout: dp {self.dp} does not divide tp {self.tp}, as SGLang needs it to")
        if self.world % self.ep:
            raise ValueError(f"engine layout: ep {self.ep} does not divide the {self.world} workers of an engine")

    @property
    def world(self) -> int:
        """Workers of one engine."""
        return self.tp * self.dp if self.engine == "vllm" else self.tp

    @property
    def node(self) -> int:
        """Workers that all-gather the slices of a bucket among themselves: neighbours, all on one node."""
        return gcd(self.world, self.gpus_per_node)
