"""Arguments of an engine's server that are mrl's own, so that rollout.args may not give them. Imports nothing heavy."""
from __future__ import annotations

from typing import Mapping, Optional

_HOST_AND_PORT = "the server is asked at rollout.host and rollout.port"
_NO_KEY, _PLAIN_HTTP = "requests carry no key", "requests go over plain HTTP"
_AS_SENT = "weights are received as the trainer sends them"
_TP, _EP, _DP = (f"it comes from rollout.parallel.{size}" for size in ("tp", "ep", "dp"))
_NO_OTHER = "an engine is split by the sizes of rollout.parallel alone"
_ENGINES, _ONE_MACHINE = "the number of engines follows from the cluster section", "an engine is on one machine"

_COMMON = {
    "--served-model-name": "requests name the model by it",
    "--dtype": "it comes from model.dtype",
    "--host": "it comes from rollout.host",
    "--port": "it comes from rollout.port",
    "--api-key": _NO_KEY,
    "--ssl-keyfile": _PLAIN_HTTP,
    "--ssl-certfile": _PLAIN_HTTP,
    "--load-format": "weights come from the trainer",
    "--quantization": _AS_SENT,
    "--tensor-parallel-size": _TP,
    "--pipeline-parallel-size": _NO_OTHER,
    "--nnodes": _ONE_MACHINE,
    "--enable-return-routed-experts": "it comes from trainer.moe_routing",
    "--config": "a file could set any of mrl's own arguments",
}
_EXPERTS_STAY = "a sync writes experts where they were when the engine started"
_CONFIG = "trainer and engines have one config.json; for fp8 there is rollout.quantization"
_LENGTH = "it comes from data.max_prompt_tokens and rollout.sampling.max_response_tokens"

OWNED_FLAGS: Mapping[str, Mapping[str, str]] = {
    "vllm": {
        **_COMMON,
        "--model": "it comes from model.path",
        "--data-parallel-size": _ENGINES,
        "--seed": "it comes from seed",
        "--max-model-len": _LENGTH,
        "--uds": _HOST_AND_PORT,
        "--root-path": _HOST_AND_PORT,
        "--enable-expert-parallel": _EP,
        "--no-enable-expert-parallel": _EP,
        "--hf-overrides": _CONFIG,
        "--hf-config-path": _CONFIG,
        "--enable-eplb": _EXPERTS_STAY,
        "--eplb-config": _EXPERTS_STAY,
        "-q": _AS_SENT,
        "--worker-cls": "weights are received by mrl's worker extension",
        "--worker-extension-cls": "weights are received by mrl's worker extension",
        "--enable-sleep-mode": "it comes from loop.sleep_engines",
        "--no-enable-sleep-mode": "it comes from loop.sleep_engines",
        "--logprobs-mode": "training needs the log-probs of the distribution sampled from",
        "-tp": _TP,
        "-pp": _NO_OTHER,
        "-dp": _ENGINES,
        "-n": _ONE_MACHINE,
    },
    "sglang": {
        **_COMMON,
        "--model": "it comes from model.path",
        "--model-path": "it comes from model.path",
        "--random-seed": "it comes from seed",
        "--context-length": _LENGTH,
        "--fastapi-root-path": _HOST_AND_PORT,
        "--json-model-override-args": _CONFIG,
        "--enable-eplb": _EXPERTS_STAY,
        "--init-expert-location": _EXPERTS_STAY,
        "--ep-num-redundant-experts": _EXPERTS_STAY,
        "--tokenizer-worker-num": "workers are called through the one server process",
        "--admin-api-key": _NO_KEY,
        "--custom-weight-loader": "weights are received by mrl's plugin",
        "--sampling-backend": "it must be the one that takes a seed for each request",
        "--skip-tokenizer-init": "requests and answers are token ids",
        "--device": "it comes from cluster.device",
        "--enable-memory-saver": "it comes from loop.sleep_engines",
        "--tp": _TP,
        "--tp-size": _TP,
        "--pp-size": _NO_OTHER,
        "--ep": _EP,
        "--ep-size": _EP,
        "--expert-parallel-size": _EP,
        "--dp": _DP,
        "--dp-size": _DP,
        "--data-parallel-size": _DP,
        "--enable-dp-attention": _DP,
        "--attn-dp-size": _DP,
        "--attention-data-parallel-size": _DP,
        "--moe-dp-size": _NO_OTHER,
        "--moe-data-parallel-size": _NO_OTHER,
        "--attn-cp-size": _NO_OTHER,
        "--attention-context-parallel-size": _NO_OTHER,
        "--dist-init-addr": _ONE_MACHINE,
        "--node-rank": _ONE_MACHINE,
    },
}
"""By rollout.engine: arguments that mrl gives itself, or that would break what it relies on, and why (to be read after
"since")."""


def owned_flag(engine: str, argument: str) -> Optional[str]:
    """The key of OWNED_FLAGS[engine] that `argument` sets, in any spelling that the engine's parser takes, or None.

    Those are --flag, --flag=value, --flag.field, underscores for dashes, and abbreviations.
    """
    flags = OWNED_FLAGS[engine]
    name = argument.split("=", 1)[0].split(".", 1)[0].replace("_", "-")
    if name in flags:
        return name
    if name.startswith("--") and name != "--":
        return next((flag for flag in flags if flag.startswith(name)), None)
    return None
