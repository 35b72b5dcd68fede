"""Replays a weight sync on a described cluster, and prints how long it takes, what every kind of link carries and which
one is the bottleneck. Starts nothing and needs no GPU.

    python tools/simulate_sync.py kimi-k2 --fp8 --tp 8 --pp 8 --dp 4 --ep 32 --last-stage-layers 5 \
        --engines 8 --engine-tp 16 --strategy all

MODEL is one of the presets or a Hugging Face model directory (only its config.json is read). What is simulated, and
what is not, is said in mrl/reshard/simulate.py. Times are of the transfer and the copies around it, and --control-ms
for the calls that start and end a sync. "receive bound": the model's bytes through the NICs of one engine's GPUs.
"""
from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any, Mapping, Sequence

from rich.console import Console
from rich.table import Table

from mrl.reshard.buckets import WEIGHT_DTYPES
from mrl.reshard.engine_layout import EngineLayout
from mrl.reshard.layout import Layout
from mrl.reshard.network import Network
from mrl.reshard.plan import SyncOptions, SyncPlan, plan_sync
from mrl.reshard.simulate import MEMORY_GB_S, Simulated, simulate
from mrl.reshard.spec import model_spec, read_config

STRATEGIES = ("broadcast", "multi_sender", "sharded")
MIB = 1 << 20

_COMMON = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
_QWEN3_MOE = {
    **_COMMON, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 128,
    "num_experts_per_tok": 8, "norm_topk_prob": True, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
    "rope_theta": 1e6, "max_position_embeddings": 40960,
}
_DEEPSEEK_V3 = {
    **_COMMON, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "num_hidden_layers": 61,
    "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    "moe_layer_freq": 1, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "qwen2.5-7b": {
        **_COMMON, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_hidden_layers": 28,
        "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4,
        "vocab_size": 152064, "rope_theta": 1e6,
    },
    "qwen3-30b-a3b": {
        **_QWEN3_MOE, "num_hidden_layers": 48, "hidden_size": 2048, "intermediate_size": 6144,
        "moe_intermediate_size": 768, "num_attention_heads": 32,
    },
    "qwen3-235b-a22b": {
        **_QWEN3_MOE, "num_hidden_layers": 94, "hidden_size": 4096, "intermediate_size": 12288,
        "moe_intermediate_size": 1536, "num_attention_heads": 64,
    },
    "deepseek-v3": {  # 671B
        **_DEEPSEEK_V3, "num_attention_heads": 128, "num_key_value_heads": 128, "n_routed_experts": 256,
        "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "vocab_size": 129280,
        "rope_theta": 10000,
    },
    "kimi-k2": {  # 1T
        **_DEEPSEEK_V3, "num_attention_heads": 64, "num_key_value_heads": 64, "n_routed_experts": 384,
        "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827,
        "vocab_size": 163840, "rope_theta": 50000,
    },
}


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", help=f"{', '.join(PRESETS)}, or a directory with a config.json")
    parser.add_argument("--dtype", choices=WEIGHT_DTYPES, default="bfloat16", help="of the weights")
    parser.add_argument("--fp8", action="store_true", help="engines get projections in blockwise fp8")
    parser.add_argument("--strategy", choices=("auto", "all", *STRATEGIES), default="all")

    trainers = parser.add_argument_group("trainers")
    for name in ("tp", "pp", "dp", "ep", "etp"):
        trainers.add_argument(f"--{name}", type=int, default=1)
    for name in ("--first-stage-layers", "--last-stage-layers"):
        trainers.add_argument(name, type=int, help="where the layers do not divide evenly")

    engines = parser.add_argument_group("engines")
    engines.add_argument("--engine", choices=("vllm", "sglang"), default="vllm")
    engines.add_argument("--engines", type=int, default=1, help="how many")
    for name, meaning in (("tp", "tensor parallel"), ("ep", "expert parallel"), ("dp", "attention data parallel")):
        engines.add_argument(f"--engine-{name}", type=int, default=1, help=f"{meaning} size of each")

    network = parser.add_argument_group("network", "GB/s are 10^9 bytes a second, in one direction")
    usual = Network()
    network.add_argument("--gpus-per-node", type=int, default=usual.gpus_per_node)
    network.add_argument("--nic-gb-s", type=float, default=usual.nic_gb_s, help="of each GPU")
    network.add_argument("--nvlink-gb-s", type=float, default=usual.nvlink_gb_s, help="of each GPU")
    network.add_argument("--latency-us", type=float, default=usual.latency_s * 1e6, help="of a message")
    network.add_argument("--memory-gb-s", type=float, default=MEMORY_GB_S, help="of each GPU's memory")

    sync = parser.add_argument_group("sync")
    sync.add_argument("--bucket-mb", type=float, default=512.0, help="sync.bucket_mb")
    sync.add_argument("--buffers", type=int, default=2, help="sync.buffers")
    sync.add_argument("--control-ms", type=float, default=20.0, help="calls that do not depend on the model's size; "
                                                                     "measured: docs/benchmarks.md")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser


def plan(options: argparse.Namespace, strategy: str) -> SyncPlan:
    """The plan of one strategy. ValueError where model, layouts and options do not fit."""
    spec = model_spec(PRESETS[options.model] if options.model in PRESETS else read_config(options.model))
    layout = Layout(tp=options.tp, pp=options.pp, dp=options.dp, ep=options.ep, etp=options.etp,
                    first_stage_layers=options.first_stage_layers, last_stage_layers=options.last_stage_layers)
    engines = EngineLayout(options.engine, options.engines, options.engine_tp, options.engine_ep, options.engine_dp,
                           options.gpus_per_node)
    network = Network(options.gpus_per_node, options.nic_gb_s, options.nvlink_gb_s, options.latency_us / 1e6)
    sync = SyncOptions(int(options.bucket_mb * MIB), options.dtype, True, strategy, fp8=options.fp8)
    return plan_sync(spec, layout, engines, sync, network)


def run(options: argparse.Namespace, strategy: str) -> dict[str, Any]:
    """One strategy planned and replayed: what the tables show, as plain JSON types."""
    made = plan(options, strategy)
    replayed: Simulated = simulate(made.outline, made.engine_layout, made.network, options.buffers,
                                   options.memory_gb_s)
    seconds = replayed.seconds + options.control_ms / 1e3
    receive_bound_s = made.total_bytes / (made.engine_layout.world * made.network.nic_gb_s * 1e9)
    return {
        "model": options.model, "dtype": "fp8" if options.fp8 else options.dtype, "strategy": made.strategy,
        "bytes": made.total_bytes,
        "trainer_gpus": made.layout.world, "engine_gpus": made.engine_layout.count * made.engine_layout.world,
        "buckets": len(made.outline), "seconds": seconds, "lower_bound_s": made.lower_bound_s,
        "predicted_s": made.predicted_s, "receive_bound_s": receive_bound_s,
        "delivered_gb_s": made.total_bytes * made.engine_layout.count / seconds / 1e9,
        "bottleneck": replayed.bottleneck.kind, "links": [asdict(use) for use in replayed.uses],
    }


def show(results: Sequence[Mapping[str, Any]], console: Console) -> None:
    """The times of all strategies, then the links of each."""
    first = results[0]
    title = (f"{first['model']}, {first['bytes'] / 1e9:.1f} GB in {first['dtype']}: {first['trainer_gpus']} trainer "
             f"GPUs to {first['engine_gpus']} engine GPUs")
    times = _table(title, "strategy", "seconds", "x lower bound", "x receive bound", "GB/s delivered", "buckets",
                   "bottleneck")
    links = _table("links", "strategy", "kind", "used", "busiest, GB", "mean, GB", "busiest, utilised")
    for result in results:
        times.add_row(
            result["strategy"], f"{result['seconds']:.3f}", f"{result['seconds'] / result['lower_bound_s']:.2f}",
            f"{result['seconds'] / result['receive_bound_s']:.2f}", f"{result['delivered_gb_s']:.0f}",
            str(result["buckets"]), result["bottleneck"])
        for use in result["links"]:
            links.add_row(result["strategy"], use["kind"], str(use["links"]), f"{use['busiest_bytes'] / 1e9:.2f}",
                          f"{use['mean_bytes'] / 1e9:.2f}", f"{use['utilisation']:.0%}")
        links.add_section()
    console.print(times, links, f"receive bound {first['receive_bound_s']:.3f} s")


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title)
    for heading in headings:
        words = heading in ("strategy", "kind", "bottleneck")
        table.add_column(heading, justify="left" if words else "right", no_wrap=True)
    return table


def main(argv: Sequence[str] | None = None) -> None:
    options = arguments().parse_args(argv)
    strategies = STRATEGIES if options.strategy == "all" else (options.strategy,)
    try:
        results = [run(options, strategy) for strategy in strategies]
    except (ValueError, FileNotFoundError) as error:
        raise SystemExit(f"simulate_sync: {error}") from error
    if options.json:
        print(json.dumps(results, indent=2))
    else:
        show(results, Console())


if __name__ == "__main__":
    main()
