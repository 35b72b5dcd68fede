"""The engines there are, by the name that rollout.engine gives them."""
from __future__ import annotations

from typing import Mapping

from mrl.engine.http import HttpServer
from mrl.engine.sglang import SglangServer
from mrl.engine.vllm import VllmServer

SERVERS: Mapping[str, type[HttpServer]] = {server.engine: server for server in (VllmServer, SglangServer)}
