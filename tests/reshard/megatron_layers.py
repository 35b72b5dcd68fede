"""Program: the layers that Megatron builds on every (stage, chunk) of the layouts it reads; null where it refuses.

A process of its own, because the CPU patches that Megatron needs are process-wide.
"""
from __future__ import annotations

import json
import sys
from types import SimpleNamespace

from mrl.platform import get_platform


def layers(num_layers: int, layout: dict) -> list[list[list[int]]] | None:
    """[stage][chunk] -> first layer and number of layers."""
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    config = SimpleNamespace(
        num_layers=num_layers, pipeline_model_parallel_size=layout["pp"], pipeline_model_parallel_layout=None,
        virtual_pipeline_model_parallel_size=layout["vpp"] if layout["vpp"] > 1 else None,
        num_layers_in_first_pipeline_stage=layout["first_stage_layers"],
        num_layers_in_last_pipeline_stage=layout["last_stage_layers"],
        account_for_embedding_in_pipeline_split=False, account_for_loss_in_pipeline_split=False,
    )
    try:
        return [[[get_transformer_layer_offset(config, chunk, stage), get_num_layers_to_build(config, chunk, stage)]
                 for chunk in range(layout["vpp"])] for stage in range(layout["pp"])]
    except (AssertionError, ZeroDivisionError):
        return None


if __name__ == "__main__":
    get_platform("cpu").install()
    json.dump([layers(*case) for case in json.load(sys.stdin)], sys.stdout)
