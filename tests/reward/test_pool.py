"""The pool: verifiers that hang, crash, raise or return nonsense cost one reward of 0 and nothing else."""
import asyncio
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from mrl.config.schema import Reward
from mrl.reward.api import RewardError, Sample
from mrl.reward.pool import RewardPool, RewardResult
from tests.waiting import wait_until

# One function whose behaviour the response chooses.
MISBEHAVING = r"""
import ctypes, os, pathlib, sys, time

def reward(prompt, response, answer, **row):
    kind, _, argument = response.partition(":")
    if kind == "pid":
        return float(os.getpid())
    if kind == "hang":
        while True:
            pass
    if kind == "hang_in_c":
        ctypes.PyDLL(None).sleep(600)      # holds the interpreter lock
    if kind == "hang_with_child":
        child = os.fork()
        if child == 0:
            time.sleep(600)
        pathlib.Path(argument).write_text(str(child))
        time.sleep(600)
    if kind == "sleep":
        time.sleep(float(argument))
        return float(argument)
    if kind == "raise":
        raise KeyError("lost")
    if kind == "exit":
        sys.exit(0)
    if kind == "die":
        os._exit(3)
    if kind == "print":
        print("noise on standard output", flush=True)
        os.write(1, b"more noise")
        return 0.75
    return {"nan": float("nan"), "inf": float("inf"), "none": None, "text": "1.0", "list": [1.0], "bool": True,
            "int": 1, "row": row.get("level")}[kind]
"""


@pytest.fixture
def custom(tmp_path):
    (tmp_path / "misbehaving.py").write_text(MISBEHAVING)
    pools = []

    def make(function="reward", **keys):
        pools.append(RewardPool(Reward(kind="custom", function=f"{tmp_path}/misbehaving.py:{function}", **keys)))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def scores(pool, responses, row=None, answer="a"):
    return asyncio.run(pool.score([Sample("p", response, answer, row or {}) for response in responses]))


async def score_one(pool, response, answer="a", prompt="p"):
    [result] = await pool.score([Sample(prompt, response, answer)])
    return result


def alive(pid):
    try:
        return Path(f"/proc/{int(pid)}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_math_through_the_pool():
    pool = RewardPool(Reward(kind="math"))
    try:
        results = scores(pool, [r"\boxed{18}", "18", "19"])
        assert [r.reward for r in results] == [0.0, 0.0, 0.0]
        assert [r.extracted for r in results] == ["18", "18", "19"]
        right = asyncio.run(score_one(pool, r"so \boxed{\frac{36}{2}}", "18"))
        assert right == RewardResult(1.0, error=None, extracted=r"\frac{36}{2}", parts={"math": 1.0}, correct=True)
        assert pool.metrics() == {"calls": 4, "timeout": 0, "crash": 0, "error": 0, "invalid": 0}
    finally:
        pool.close()


def test_an_expression_too_large_to_evaluate_is_a_counted_zero():
    pool = RewardPool(Reward(kind="math", timeout_s=2))
    try:
        result = asyncio.run(score_one(pool, r"\boxed{9^{9^{9^{9}}}}", "7"))
        assert result.reward == 0.0
        assert asyncio.run(score_one(pool, r"\boxed{7}", "7")).reward == 1.0
    finally:
        pool.close()


def test_results_go_to_their_own_callers_in_any_order(custom):
    pool = custom(processes=2)
    waits = ["sleep:0.4", "sleep:0.0", "raise", "sleep:0.1", "sleep:0.2", "int"]
    assert [r.reward for r in scores(pool, waits)] == [0.4, 0.0, 0.0, 0.1, 0.2, 1.0]


@pytest.mark.parametrize("hang", ["hang", "hang_in_c"])
def test_a_hung_verifier_is_killed_replaced_and_counted(custom, hang):
    pool = custom(timeout_s=4.0)
    before, hung, after = scores(pool, ["pid", hang, "pid"])
    assert hung.reward == 0.0 and hung.error.startswith("custom: timeout")
    assert after.error is None and after.reward != before.reward
    assert not alive(before.reward) and alive(after.reward)
    assert pool.metrics()["timeout"] == 1


def test_a_kill_takes_what_the_verifier_started(custom, tmp_path):
    pool = custom(timeout_s=4.0)
    [result] = scores(pool, [f"hang_with_child:{tmp_path}/child"])
    assert result.error.startswith("custom: timeout")
    wait_until(lambda: not alive((tmp_path / "child").read_text()), 300)


def test_waiting_for_a_free_process_does_not_count_as_time(custom):
    pool = custom(timeout_s=4.0, processes=1)
    results = scores(pool, ["sleep:1.1"] * 4)
    assert [r.error for r in results] == [None] * 4


@pytest.mark.parametrize("response, fault, words", [
    ("raise", "error", "KeyError: 'lost'"),
    ("exit", "error", "SystemExit"),
    ("unknown kind", "error", "KeyError"),
    ("die", "crash", "exit status 3"),
    ("nan", "invalid", "not finite"),
    ("inf", "invalid", "not finite"),
    ("none", "invalid", "NoneType"),
    ("text", "invalid", "not a number"),
    ("list", "invalid", "not a number"),
])
def test_a_fault_is_zero_with_a_reason_and_shifts_nothing(custom, response, fault, words):
    pool = custom()
    first, faulty, last = scores(pool, ["int", response, "sleep:0.01"])
    assert (first.reward, first.error) == (1.0, None)
    assert faulty.reward == 0.0 and faulty.error.startswith(f"custom: {fault}: ") and words in faulty.error
    assert (last.reward, last.error) == (0.01, None)
    assert pool.metrics()[fault] == 1 and pool.metrics()["calls"] == 3


def test_numbers_rows_and_printing(custom):
    pool = custom()
    results = scores(pool, ["bool", "int", "row", "print"], row={"level": 3, "prompt": "p"})
    assert [r.reward for r in results] == [1.0, 1.0, 3.0, 0.75]
    assert all(r.error is None for r in results)


def test_a_large_prompt_passes(custom):
    pool = custom()
    assert asyncio.run(score_one(pool, "int", prompt="x" * 3_000_000)).reward == 1.0


def test_close_leaves_no_process_and_ends_calls_in_progress(custom):
    pool = custom(processes=2, timeout_s=60)

    async def close_in_the_middle():
        pid = int((await score_one(pool, "pid")).reward)
        hanging = asyncio.create_task(score_one(pool, "hang"))
        await asyncio.sleep(0.3)
        pool.close()
        with pytest.raises(RewardError, match="closed"):
            await hanging
        with pytest.raises(RewardError, match="closed"):
            await score_one(pool, "int")
        return pid

    assert not alive(asyncio.run(close_in_the_middle()))
    pool.close()


@pytest.mark.parametrize("response", ["int", "hang", "hang_in_c"])
def test_a_verifier_dies_with_its_parent_even_while_it_hangs(tmp_path, response):
    (tmp_path / "misbehaving.py").write_text(MISBEHAVING)
    parent_source = f"""
import asyncio, os, signal
from mrl.config.schema import Reward
from mrl.reward.api import Sample
from mrl.reward.pool import RewardPool

async def main():
    pool = RewardPool(Reward(kind="custom", function={str(tmp_path / 'misbehaving.py') + ':reward'!r}, timeout_s=60))
    [result] = await pool.score([Sample("p", "pid", "a")])
    print(int(result.reward), flush=True)
    task = asyncio.create_task(pool.score([Sample("p", {response!r}, "a")]))
    await asyncio.sleep(0.3)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""
    parent = subprocess.run([sys.executable, "-c", parent_source], capture_output=True, text=True, timeout=300)
    assert parent.returncode == -9, parent.stderr
    wait_until(lambda: not alive(parent.stdout), 300)


def test_it_works_on_an_event_loop_outside_the_main_thread(custom):
    pool, results = custom(), []
    thread = threading.Thread(target=lambda: results.extend(scores(pool, ["int", "bool"])))
    thread.start()
    thread.join(300)
    assert [r.reward for r in results] == [1.0, 1.0]


def test_a_verifier_process_starts_without_torch(tmp_path):
    (tmp_path / "modules.py").write_text(
        "import sys\ndef reward(prompt, response, answer):\n"
        "    return float(any(name in sys.modules for name in ('torch', 'ray', 'pydantic', 'transformers')))\n")
    pool = RewardPool(Reward(kind="custom", function=f"{tmp_path}/modules.py:reward"))
    try:
        assert asyncio.run(score_one(pool, "r")).reward == 0.0
    finally:
        pool.close()


def test_a_reward_file_that_does_not_load_is_an_error_not_a_zero(tmp_path):
    (tmp_path / "broken.py").write_text("import no_such_module_anywhere\n")
    for function, words in [(f"{tmp_path}/broken.py:reward", "no_such_module_anywhere"),
                            (f"{tmp_path}/absent.py:reward", "there is no file")]:
        pool = RewardPool(Reward(kind="custom", function=function))
        try:
            with pytest.raises(RewardError, match=words):
                asyncio.run(score_one(pool, "r"))
        finally:
            pool.close()


def test_reference_answers_are_checked_before_the_run_and_rows_named():
    pool = RewardPool(Reward(kind="math"))
    try:
        asyncio.run(pool.check_answers([("18", {}), (r"\frac{1}{2}", {}), (7, {})]))
        with pytest.raises(RewardError, match=r"2 reference answers(.|\n)*row 1: (.|\n)*row 3: "):
            asyncio.run(pool.check_answers([("18", {}), ("???", {}), ("5", {}), ("", {})]))
    finally:
        pool.close()


def test_no_process_outlives_these_tests():
    children = [stat.parent for stat in Path("/proc").glob("[0-9]*/stat")
                if alive(stat.parent.name) and stat.read_text().rsplit(")", 1)[1].split()[1] == str(os.getpid())]
    assert not [child for child in children if b"mrl.reward.worker" in (child / "cmdline").read_bytes()]
