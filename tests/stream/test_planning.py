"""From an experiment to its sync plan."""
import pytest

from mrl.reshard import EngineLayout, Layout
from mrl.stream.planning import plan_of, receive_buffers, with_transport
from tests.reshard.simulate import spec_of
from tests.rollout.experiments import experiment


def test_layers_that_predict_further_tokens_are_not_sent():
    spec = spec_of("deepseek-v3-mtp")
    assert spec.mtp_layers
    plan = plan_of(experiment(), spec, Layout(), te=False)
    sent = {part.name for bucket in plan.of_engine(0) for one in bucket.slices for part in one.parts}
    layers = {int(name.split(".")[2]) for name in sent if name.startswith("model.layers.")}
    assert layers == set(range(spec.num_layers)) and "lm_head.weight" in sent


def test_engines_are_as_the_experiment_splits_them():
    sizes = {"engine": "sglang", "parallel": {"tp": 4, "ep": 2, "dp": 2}}
    plan = plan_of(experiment(rollout=sizes, cluster={"rollout_gpus": 8, "gpus_per_node": 4}), spec_of("qwen3-moe"),
                   Layout(), te=False)
    assert plan.engine_layout == EngineLayout("sglang", count=2, tp=4, ep=2, dp=2, gpus_per_node=4)


@pytest.mark.parametrize("changes, buffers", [
    ({}, 0), ({"rollout": {"parallel": {"tp": 2}}}, 3), ({"sync": {"delta": True}}, 3),
    ({"sync": {"transport": "gloo"}}, 3)])
def test_workers_need_buffers_unless_they_read_a_ranks_memory(changes, buffers):
    sections = {"loop": {"mode": "colocated_sync"}, "rollout": {},
                "cluster": {"gpus": 2, "trainer_gpus": None, "rollout_gpus": None}, **changes}
    exp = experiment(**{**sections, "sync": {"buffers": 3, **changes.get("sync", {})}})
    assert receive_buffers(with_transport(exp, "cuda")) == buffers
