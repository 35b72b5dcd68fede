"""From an experiment to its sync plan."""
from mrl.reshard import Layout
from mrl.stream.planning import plan_of
from tests.reshard.simulate import spec_of
from tests.rollout.experiments import experiment


def test_layers_that_predict_further_tokens_are_not_sent():
    spec = spec_of("deepseek-v3-mtp")
    assert spec.mtp_layers
    plan = plan_of(experiment(), spec, Layout(), te=False)
    sent = {part.name for bucket in plan.of_engine(0) for one in bucket.slices for part in one.parts}
    layers = {int(name.split(".")[2]) for name in sent if name.startswith("model.layers.")}
    assert layers == set(range(spec.num_layers)) and "lm_head.weight" in sent
