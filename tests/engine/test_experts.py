"""The experts that engines name: in the forms that they document, and what of them is believed."""
import asyncio
import base64
import io
import json

import numpy as np
import pytest

from mrl.engine.api import GenerateRequest
from mrl.engine.teacher import teacher_experiment
from mrl.reshard.spec import model_spec
from tests.engine.test_engines import ENGINES, answer_of, server
from tests.reshard.simulate import hf_config
from tests.rollout.experiments import experiment

PROMPT = [1, 2]


@pytest.fixture
def sections(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(hf_config("deepseek-v3")))
    return {"model": {"path": str(tmp_path)}, "trainer": {"moe_routing": "replay"}}


def encoded(engine: str, chosen: np.ndarray) -> str:
    if engine == "sglang":
        return base64.b64encode(chosen.astype(np.int32).tobytes()).decode()
    file = io.BytesIO()
    np.save(file, chosen.astype(np.uint8))
    return base64.b64encode(file.getvalue()).decode()


def choices(spec, tokens: int) -> np.ndarray:
    scores = np.random.default_rng(0).random((tokens, spec.num_layers, spec.moe.num_experts))
    return np.argsort(scores, axis=-1)[..., :spec.moe.top_k]


def told(engine: str, sections: dict, chosen: np.ndarray | None) -> np.ndarray:
    """What becomes of an answer of one token for a prompt of two."""
    one, body = server(engine, **sections), answer_of(engine, "stop", [-0.5])
    if chosen is not None:
        where = body["meta_info"] if engine == "sglang" else body["choices"][0]
        where["routed_experts"] = encoded(engine, chosen)
    sent = []

    async def post(route, asked):
        sent.append(asked)
        return body

    one.post = post
    answer = asyncio.run(one.generate(GenerateRequest(PROMPT, seed=1, max_tokens=1, temperature=1.0)))
    assert sent[0].get("return_routed_experts", False) == (engine == "sglang")
    return answer[3]


@pytest.mark.parametrize("engine", ENGINES)
def test_of_every_token_but_the_last_the_layers_that_have_experts(engine, sections):
    spec = model_spec(hf_config("deepseek-v3"))
    assert "--enable-return-routed-experts" in server(engine, **sections).command_line(1)
    chosen = choices(spec, len(PROMPT))
    chosen[:, :spec.moe.dense_layers] = 0  # memory that no router writes to
    experts = told(engine, sections, chosen)
    assert experts.dtype == np.int16 and spec.moe.dense_layers > 0
    np.testing.assert_array_equal(experts, chosen[:, spec.moe.dense_layers:])


@pytest.mark.parametrize("engine", ENGINES)
def test_an_answer_that_cannot_be_right_is_refused(engine, sections):
    spec = model_spec(hf_config("deepseek-v3"))
    with pytest.raises(RuntimeError, match=r"answered nothing; set trainer.moe_routing: own"):
        told(engine, sections, None)
    with pytest.raises(RuntimeError, match="to name the experts of each token, shape"):
        told(engine, sections, choices(spec, 3))
    with pytest.raises(RuntimeError, match="or one twice for a token"):
        told(engine, sections, np.zeros((2, spec.num_layers, spec.moe.top_k)))
    with pytest.raises(RuntimeError, match="experts outside 0 to"):
        told(engine, sections, choices(spec, 2) + spec.moe.num_experts)


@pytest.mark.parametrize("engine", ENGINES)
def test_without_replay_and_of_a_teacher_nothing_is_asked(engine, sections):
    plain = server(engine, model=sections["model"])
    assert plain.replayed is None and "--enable-return-routed-experts" not in plain.command_line(1)
    taught = experiment(**sections, teacher={"path": "t", "python": "p"}, algorithm={"name": "distill"})
    assert teacher_experiment(taught).trainer.moe_routing == "own"
