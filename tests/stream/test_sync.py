"""Pushes to real engines from gangs of one and of several ranks: right after every sync, and safe when one breaks."""
import json
import subprocess
import time
from dataclasses import replace

import pytest
import ray
import torch

from mrl.config.schema import Experiment
from mrl.engine.api import EngineClosed, EngineLost, GenerateRequest, SyncError, Version
from mrl.receiver.mrl_receiver.wire import SyncRequest
from mrl.reshard.layout import Layout
from mrl.stream.links import Links
from mrl.stream.sync import WeightSync
from tests.stream.engines import ROOT, RUN_ID, STRATEGIES, TOLERANCE, alive, push_from_gang
from tests.stream.tiny import PROMPT, FakeTrainer, reference_log_probs, weights
from tests.torchrun import torchrun

REQUEST = GenerateRequest(PROMPT, seed=1, max_tokens=4, temperature=1.0)


by_every_strategy = pytest.mark.parametrize("pushing", STRATEGIES, indirect=True)


def push(bench, pushing, step: int | None = None):
    trainer, sync = pushing
    step = step or bench.next_step()
    tensors = weights(bench.model, step)
    trainer.become(tensors)
    return sync.push(Version(0, step)), tensors


@by_every_strategy
def test_two_syncs_in_a_row_and_every_second_one_verified(bench, pushing):
    for verified in (True, False, True):
        if bench.call("status").state == "serving":
            assert bench.call("workers", "mrl_scramble", "1") == [{"error": None}]
        report, tensors = push(bench, pushing)
        assert report.errors == {0: None} and report.verified is verified and report.unverified == ()
        assert report.bytes == sum(tensor.numel() * 4 for tensor in tensors.values())
        status = bench.call("status")
        assert (status.state, status.version) == ("serving", Version(0, bench.step))
        assert bench.log_prob_error(tensors) < TOLERANCE
    assert len(pushing[1].plan.outline) > 4 and report.strategy == pushing[1].settings.strategy


def test_files_bring_weights_too(bench, one_rank, tmp_path):
    settings = bench.experiment.sync.model_copy(update={"transport": "disk"})
    trainer = FakeTrainer(bench.model, Layout(), Layout().coord(0))
    sync = WeightSync(bench.experiment.model_copy(update={"sync": settings}), trainer, [bench.engine], RUN_ID,
                      folder=tmp_path / "weights")
    for verified in (True, False):
        report, tensors = push(bench, (trainer, sync))
        assert report.ok and report.verified is verified, report
        assert bench.log_prob_error(tensors) < TOLERANCE
    sync.close()
    assert list(tmp_path.iterdir()) == []


def test_changes_alone_bring_weights_too(bench, one_rank):
    settings = bench.experiment.sync.model_copy(update={"strategy": "sharded", "delta": True})
    trainer = FakeTrainer(bench.model, Layout(), Layout().coord(0))
    sync = WeightSync(bench.experiment.model_copy(update={"sync": settings}), trainer, [bench.engine], RUN_ID)
    report, tensors = push(bench, (trainer, sync))
    assert report.ok and report.sent_fraction > 1
    for verified in (True, True, False):  # the first one of changes, and every second one
        step = bench.next_step()
        for number, new in enumerate(weights(bench.model, step).values()):
            [*tensors.values()][number].view(-1)[step % 50::50] = new.view(-1)[step % 50::50]
        trainer.become(tensors)
        report = sync.push(Version(0, step))
        assert report.ok and report.verified is verified and report.sent_fraction < 0.05, report
        assert bench.log_prob_error(tensors) < TOLERANCE
    sync.close()


def test_log_probs_have_the_temperature_applied(bench, pushing):
    _, tensors = push(bench, pushing)
    assert bench.log_prob_error(tensors, temperature=0.6) < TOLERANCE
    assert bench.log_prob_error(tensors, temperature=1.7) < TOLERANCE


def test_scrambled_weights_show_so_that_the_checks_above_mean_something(bench, pushing):
    push(bench, pushing)
    bench.call("workers", "mrl_scramble", "1")
    sampled = bench.call("generate", replace(REQUEST, prompt_ids=[9, 8, 7, 6]))  # a prompt no cache has seen
    push(bench, pushing)
    assert sampled.log_probs != bench.call("generate", replace(REQUEST, prompt_ids=[9, 8, 7, 6])).log_probs


def test_the_prefix_cache_does_not_survive_a_sync(bench, pushing):
    prompt = PROMPT * 5  # longer than a cache block
    for _ in range(2):
        _, tensors = push(bench, pushing)
        answer = bench.call("generate", GenerateRequest(prompt, seed=1, max_tokens=4, temperature=1.0))
        expected = reference_log_probs(bench.model, tensors, prompt, answer.token_ids, 1.0)
        assert torch.allclose(torch.tensor(answer.log_probs), expected, atol=TOLERANCE)


def test_the_same_seed_gives_the_same_tokens_and_many_requests_run_at_once(bench, pushing):
    push(bench, pushing)
    requests = [GenerateRequest(PROMPT, seed=seed, max_tokens=8, temperature=1.0) for seed in range(64)]
    began = time.monotonic()
    first = ray.get([bench.engine.generate.remote(request) for request in requests], timeout=120)
    print(f"{len(requests) / (time.monotonic() - began):.0f} requests/s through the gate")
    second = ray.get([bench.engine.generate.remote(request) for request in reversed(requests)], timeout=120)
    assert [c.token_ids for c in first] == [c.token_ids for c in reversed(second)]
    assert len({tuple(c.token_ids) for c in first}) > 50
    assert {c.finish_reason for c in first} <= {"length", "stop"}
    assert bench.call("status").outstanding_tokens == 0


def test_an_older_version_is_refused_and_the_engine_serves_on(bench, pushing):
    _, tensors = push(bench, pushing)
    for step in (bench.step - 1, bench.step):
        report, _ = push(bench, pushing, step)
        assert f"version 0:{step} is refused" in report.errors[0]
    assert bench.call("status").version == Version(0, bench.step)
    assert bench.log_prob_error(tensors) < TOLERANCE
    report, tensors = push(bench, pushing)
    assert report.ok and bench.log_prob_error(tensors) < TOLERANCE


def test_gangs_of_two_ranks(bench, tmp_path):
    """Two tp ranks, two stages, two replicas."""
    for reports in push_from_gang(bench, tmp_path, 2, [(2, 1), (1, 2), (1, 1)]):
        assert [report.strategy for report in reports] == [strategy for strategy in STRATEGIES for _ in range(2)]
        assert [report.verified for report in reports] == [True, False] * len(STRATEGIES)
        assert all(report.errors == {0: None} for report in reports)
    assert bench.call("status").version == Version(0, bench.step)


def test_a_real_megatron_gang_and_the_engine_agree_after_every_push(bench, tmp_path):
    """Two tp ranks, then two stages."""
    configs = []
    for parallel in ({"tp": 2}, {"pp": 2}):
        changes = {"trainer": {"parallel": parallel, "optimizer": {"lr": 0.01, "schedule": "constant"}}}
        experiment = Experiment.model_validate({**bench.experiment.model_dump(), **changes})
        configs.append(tmp_path / f"{len(configs)}.json")
        configs[-1].write_text(experiment.model_dump_json())
    first = bench.next_step()
    bench.step += 3 * len(configs) - 1
    output = torchrun(ROOT / "tests/stream/push_megatron.py", 2, bench.ray_address, bench.name, str(first), *configs)
    differences = [float(line.split()[-1]) for line in output.splitlines() if "DIFFERENCE" in line]
    assert len(differences) == 3 * len(configs) and max(differences) < TOLERANCE


def wire_request(bench, plan: dict, step: int) -> SyncRequest:
    return SyncRequest(run_id=RUN_ID, engine=0, incarnation=bench.call("status").incarnation, version=(0, step), push=0,
                       link=f"test/{step}", connect=True, store_host="127.0.0.1", store_port=1, plan=plan, buffers=2,
                       transport="gloo", verify=False, deadline_s=20.0)


@by_every_strategy
@pytest.mark.parametrize("count", [0, 5])
def test_a_sender_killed_half_way_leaves_it_refusing_until_the_next_full_sync(bench, pushing, tmp_path, count):
    push(bench, pushing)
    step, config = bench.next_step(), tmp_path / "experiment.json"
    config.write_text(bench.experiment.model_copy(update={"sync": pushing[1].settings}).model_dump_json())
    with pytest.raises(AssertionError, match="rank 0 ended with exit code -9"):
        torchrun(ROOT / "tests/stream/dying_sender.py", 1, config, bench.ray_address, bench.name, str(step), str(count))
    began = time.monotonic()
    while "not received whole" not in (why := refusal(bench)):
        assert time.monotonic() - began < bench.experiment.sync.timeout_s / 2, why
        time.sleep(0.1)
    assert f"dirty: version 0:{step} was not received whole: worker 0: LinkError" in why
    report, tensors = push(bench, pushing, step)  # the same version, but the old link has been given up
    assert report.errors[0]
    report, tensors = push(bench, pushing, step)
    assert report.ok and bench.log_prob_error(tensors) < TOLERANCE


def refusal(bench) -> str:
    with pytest.raises(EngineClosed) as caught:
        bench.call("generate", REQUEST)
    return str(caught.value)


def misshape(plan: dict, name: str, shape: list[int]) -> dict:
    return {**plan, "tensors": {**plan["tensors"], name: shape}}


def rename(plan: dict, name: str, other: str) -> dict:
    return json.loads(json.dumps(plan).replace(f'"{name}"', f'"{other}"'))


@pytest.mark.parametrize("change, words", [
    (lambda plan: misshape(plan, "model.layers.1.mlp.down_proj.weight", [80, 48]), "down_proj.weight of shape"),
    (lambda plan: misshape(plan, "model.layers.0.self_attn.k_proj.weight", [48, 64]), "k_proj.weight of shape"),
    (lambda plan: rename(plan, "model.norm.weight", "model.nrom.weight"), "n(ro|or)m.weight"),
])
def test_a_bucket_with_a_wrong_shape_or_name_is_refused_before_any_byte(bench, pushing, change, words):
    _, tensors = push(bench, pushing)
    plan = change(pushing[1].plan.to_wire(0))
    with pytest.raises(SyncError, match=words):
        bench.call("prepare", wire_request(bench, plan, bench.next_step()))
    assert bench.log_prob_error(tensors) < TOLERANCE, "a refused plan must not touch the weights"
    report, tensors = push(bench, pushing)
    assert report.ok and bench.log_prob_error(tensors) < TOLERANCE


def test_another_runs_trainer_is_refused(bench, pushing):
    push(bench, pushing)
    request = replace(wire_request(bench, pushing[1].plan.to_wire(0), bench.next_step()), run_id="another")
    for method in ("prepare", "receive"):
        with pytest.raises(SyncError, match="not engine 0 of run 'another'"):
            bench.call(method, request)


def wait_restarted(bench, incarnation: int, processes: list[int]) -> None:
    """Until the engine is up again, dirty, and nothing is left of the server before."""
    deadline = time.monotonic() + 600
    while (status := bench.call("status")).state != "dirty":
        assert time.monotonic() < deadline and status.state == "starting", status
        time.sleep(0.5)
    assert status.incarnation == incarnation + 1
    assert not any(alive(pid) for pid in processes)


@pytest.mark.slow
def test_a_killed_engine_comes_back_dirty_and_is_pushed_to_again(bench, pushing):
    push(bench, pushing)
    incarnation, processes = bench.call("status").incarnation, bench.call("processes")
    request = replace(REQUEST, max_tokens=20)
    in_flight = [bench.engine.generate.remote(replace(request, seed=seed)) for seed in range(400)]
    while not bench.call("status").outstanding_tokens:
        time.sleep(0.01)
    subprocess.run(["kill", "-9", str(processes[1])], check=True)
    outcomes = set()
    for reference in in_flight:
        try:
            ray.get(reference, timeout=300)
            outcomes.add("answered")
        except Exception as error:
            outcomes.add(type(error.cause if hasattr(error, "cause") else error).__name__)
    assert "EngineLost" in outcomes and outcomes <= {"EngineLost", "EngineClosed", "answered"}
    report, _ = push(bench, pushing)
    assert "engine 0 is starting" in report.absent[0] and report.errors == {} and not report.ok
    wait_restarted(bench, incarnation, processes)
    with pytest.raises(EngineClosed, match="has not received any weights since its start"):
        bench.call("generate", REQUEST)
    report, tensors = push(bench, pushing)
    assert report.ok and report.verified and bench.log_prob_error(tensors) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("bench, pushing", [("sglang", "broadcast"), ("vllm", "sharded")], indirect=True)
def test_an_engine_killed_half_way_through_a_sync_comes_back_and_is_pushed_to_again(bench, pushing, monkeypatch):
    push(bench, pushing)
    incarnation, processes = bench.call("status").incarnation, bench.call("processes")
    start, sent = Links.start, []

    def start_some(links, *arguments):
        sent.append(1)
        if len(sent) == 3:
            subprocess.run(["kill", "-9", *map(str, processes[1:])], check=True)
        return start(links, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Links, "start", start_some)
        began = time.monotonic()
        report, _ = push(bench, pushing)
    assert report.errors[0] and time.monotonic() - began < bench.experiment.sync.timeout_s / 2, report
    wait_restarted(bench, incarnation, processes)
    report, tensors = push(bench, pushing)
    assert report.ok and report.verified and bench.log_prob_error(tensors) < TOLERANCE


@pytest.mark.slow
def test_a_hung_engine_is_ended_and_comes_back(bench, pushing):
    push(bench, pushing)
    incarnation, processes = bench.call("status").incarnation, bench.call("processes")
    request = wire_request(bench, pushing[1].plan.to_wire(0), bench.next_step())
    subprocess.run(["kill", "-STOP", *map(str, processes[1:])], check=True)
    with pytest.raises(EngineLost, match="did not answer mrl_prepare by the sync's deadline"):
        bench.call("prepare", replace(request, deadline_s=1.0))
    assert bench.call("status").state == "starting"
    wait_restarted(bench, incarnation, processes)
    report, tensors = push(bench, pushing)
    assert report.ok and bench.log_prob_error(tensors) < TOLERANCE
