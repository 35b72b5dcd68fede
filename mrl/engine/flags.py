"""Which arguments of vLLM's server are mrl's own, so that rollout.args may not give them. Imports nothing heavy."""
from __future__ import annotations

from typing import Mapping, Optional

OWNED_FLAGS: Mapping[str, str] = {
    "--model": "it comes from model.path",
    "--served-model-name": "requests name the model by it",
    "--dtype": "it comes from model.dtype",
    "--seed": "it comes from seed",
    "--max-model-len": "it comes from data.max_prompt_tokens and rollout.sampling.max_response_tokens",
    "--host": "it comes from rollout.host",
    "--port": "it comes from rollout.port",
    "--uds": "the server is asked at rollout.host and rollout.port",
    "--root-path": "the server is asked at rollout.host and rollout.port",
    "--api-key": "requests carry no key",
    "--ssl-keyfile": "requests go over plain HTTP",
    "--ssl-certfile": "requests go over plain HTTP",
    "--load-format": "weights come from the trainer",
    "--quantization": "weights are received as the trainer sends them",
    "-q": "weights are received as the trainer sends them",
    "--worker-cls": "weights are received by mrl's worker extension",
    "--worker-extension-cls": "weights are received by mrl's worker extension",
    "--logprobs-mode": "training needs the log-probs of the distribution sampled from",
    "--tensor-parallel-size": "it comes from rollout.parallel.tp",
    "-tp": "it comes from rollout.parallel.tp",
    "--pipeline-parallel-size": "an engine is split by rollout.parallel.tp alone",
    "-pp": "an engine is split by rollout.parallel.tp alone",
    "--data-parallel-size": "the number of engines follows from the cluster section",
    "-dp": "the number of engines follows from the cluster section",
    "--nnodes": "an engine is on one machine",
    "-n": "an engine is on one machine",
    "--config": "a file could set any of mrl's own arguments",
}
"""Arguments that mrl gives itself, or that would break what it relies on, and why (to be read after "since")."""


def owned_flag(argument: str) -> Optional[str]:
    """The key of OWNED_FLAGS that `argument` sets, in any spelling that vLLM's parser takes, or None.

    Those are --flag, --flag=value, --flag.field, underscores for dashes, and abbreviations.
    """
    name = argument.split("=", 1)[0].split(".", 1)[0].replace("_", "-")
    if name in OWNED_FLAGS:
        return name
    if name.startswith("--") and name != "--":
        return next((flag for flag in OWNED_FLAGS if flag.startswith(name)), None)
    return None
