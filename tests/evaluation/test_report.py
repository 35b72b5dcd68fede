"""Reports of hand-made groups: which numbers, under which names, of which subsets."""
from __future__ import annotations

import json

import pytest
from rich.console import Console

from mrl.config.schema import Eval
from mrl.evaluation.command import tables
from mrl.evaluation.report import flat_metrics, reports, sample_rows
from mrl.evaluation.samples import save_samples
from mrl.rollout.types import Group, GroupRequest
from tests.reference import evaluation as reference
from tests.rollout.groups import trajectory


def evaluated(row, outcomes, dataset="math", subset=""):
    """One prompt, answered with (answer, reward) pairs."""
    return Group(GroupRequest(row, row, 0, len(outcomes), "eval", dataset), f"p{row}", "a",
                 [trajectory(reward=reward, extracted=answer, response=range(i + 1),
                             finish="length" if answer is None else "stop")
                  for i, (answer, reward) in enumerate(outcomes)], subset=subset)


def report_of(groups, **config):
    return reports(groups, Eval.model_validate({"datasets": {"math": {"path": "x", **config}}}), seed=1)["math"]


RIGHT = ("4", 1.0)
GROUPS = [evaluated(0, [RIGHT, ("5", 0.5), RIGHT, (None, 0.0)], subset="easy"),
          evaluated(1, [("7", 0.0), ("7", 0.0), ("8", 1.0), ("9", 0.0)], subset="hard")]


def test_the_numbers_of_two_prompts():
    report = report_of(GROUPS)
    values = {name: result.value for name, result in report.results.items()}
    assert list(values) == [
        "acc/mean@4", "acc/best@2/mean", "acc/maj@2/mean", "pass@2", "acc/best@4/mean", "acc/maj@4/mean", "pass@4",
        "reward/mean@4", "response_length", "truncated"]
    assert values["acc/mean@4"] == pytest.approx((2 / 4 + 1 / 4) / 2)
    assert values["reward/mean@4"] == pytest.approx((2.5 / 4 + 1 / 4) / 2)
    assert values["acc/best@2/mean"] == pytest.approx((1 - 1 / 4 + 1 - 9 / 16) / 2)
    assert values["pass@2"] == pytest.approx((1 - 1 / 6 + 1 - 3 / 6) / 2)
    assert values["pass@4"] == 1.0
    votes = [[(4, 1.0), (5, 0.0), (4, 1.0), (0, 0.0)], [(7, 0.0), (7, 0.0), (8, 1.0), (9, 0.0)]]
    majority = sum(reference.majority_at_k(samples, 4) for samples in votes) / 2
    assert values["acc/maj@4/mean"] == pytest.approx(majority, abs=0.03)
    assert values["response_length"] == 2.5 and values["truncated"] == 1 / 8
    assert report.counts == {"prompts": 2, "response_length_max": 4, "reward_errors": 0, "groups_regenerated": 0}
    low, high = report.results["acc/mean@4"][1:]
    assert (low, high) == (0.25, 0.5)  # of two prompts, one may be drawn twice


def test_published_results_of_32_samples_have_their_names():
    found = flat_metrics({"aime24": report_of([evaluated(0, [RIGHT] * 8 + [("5", 0.0)] * 24)])})
    assert found["eval/aime24/acc/best@32/mean"] == pytest.approx(1 - 0.75 ** 32)
    assert found["eval/aime24/acc/maj@32/mean"] < 0.05  # three of four say 5
    assert found["eval/aime24/acc/mean@32"] == 0.25 and found["eval/aime24/pass@32"] == 1.0


def test_right_is_what_the_judging_parts_say_and_not_the_sum():
    group = evaluated(0, [("4", 1.5), ("5", 0.9)])
    group.trajectories[0].correct, group.trajectories[1].correct = False, True  # much style; no style
    values = {name: result.value for name, result in report_of([group]).results.items()}
    assert values["acc/mean@2"] == 0.5 and values["reward/mean@2"] == pytest.approx(1.2)
    assert [row["correct"] for row in sample_rows([group])] == [False, True]


def test_the_same_seed_gives_the_same_numbers_in_any_order_of_data_sets():
    assert report_of(GROUPS).results == report_of(GROUPS).results
    config = Eval.model_validate({"datasets": {"other": {"path": "y"}, "math": {"path": "x"}}})
    both = reports([evaluated(0, [RIGHT], dataset="other"), *GROUPS], config, seed=1)
    assert list(both) == ["other", "math"]
    assert both["math"].results == report_of(GROUPS).results
    assert list(both["other"].results) == ["acc/mean@1", "reward/mean@1", "response_length", "truncated"]


def test_a_missing_answer_votes_for_having_none():
    silent = [evaluated(0, [(None, 0.0)] * 3 + [RIGHT])]
    assert report_of(silent).results["acc/maj@4/mean"].value < 0.25


def test_samples_that_were_not_scored_and_groups_made_again_are_counted():
    group = evaluated(0, [RIGHT, ("5", 0.0)])
    group.trajectories[1].reward_error, group.regenerated = "math: timeout", True
    counts = report_of([group]).counts
    assert (counts["reward_errors"], counts["groups_regenerated"]) == (1, 1)


def test_a_reward_that_extracts_nothing_has_no_majority():
    names = report_of([evaluated(0, [(None, 0.0), (None, 1.0)])]).results
    assert "acc/maj@2/mean" not in names and "acc/best@2/mean" in names


def test_each_part_of_a_reward_that_has_several():
    groups = [evaluated(0, [RIGHT, ("5", 0.5)])]
    for t, short in zip(groups[0].trajectories, (0.25, 0.75)):
        t.reward_parts = {"right": t.reward, "short": short}
    results = report_of(groups).results
    assert (results["reward/right/mean@2"].value, results["reward/short/mean@2"].value) == (0.75, 0.5)


def test_metrics_of_subsets_and_intervals_have_paths_of_their_own():
    numbers = flat_metrics({"math": report_of(GROUPS, subset_key="level")})
    assert numbers["eval/math/acc/mean@4"] == pytest.approx(0.375)
    assert numbers["eval/math/by_level/easy/acc/mean@4"] == 0.5
    assert numbers["eval/math/by_level/hard/acc/mean@4"] == 0.25
    assert numbers["eval/math/by_level/hard/prompts"] == 1
    low, mean, high = (numbers[f"eval/math/acc/best@4/{end}"] for end in ("low", "mean", "high"))
    assert low < mean < high
    assert json.loads(json.dumps(numbers)) == numbers


def test_tables_show_results_with_intervals_and_subsets_in_rows():
    console = Console(record=True, width=300)
    for table in tables("m on math", report_of(GROUPS, subset_key="level"), 0.9):
        console.print(table)
    text = console.export_text()
    assert "acc/mean@4" in text and "0.3750" in text and "90% interval" in text and "0.2500 - 0.5000" in text
    easy = next(line for line in text.splitlines() if "easy" in line)
    assert "0.500 ±0.000" in easy


def test_every_sample_is_saved(tmp_path):
    save_samples(tmp_path / "samples", {"math": report_of(GROUPS)})
    rows = [json.loads(line) for line in (tmp_path / "samples" / "math.jsonl").read_text().splitlines()]
    assert [(row["row"], row["sample"]) for row in rows] == [(p, i) for p in range(2) for i in range(4)]
    assert rows[3] == {"prompt": "p0", "answer": "a", "row": 0, "subset": "easy", "sample": 3, "response": "text",
                       "extracted": None, "reward": 0.0, "reward_parts": {}, "correct": False, "reward_error": None,
                       "finish_reason": "length", "tokens": 4, "version": "0:0"}


def test_half_a_character_in_a_data_set_does_not_end_a_run(tmp_path):
    group = evaluated(0, [RIGHT])
    group.answer = "\ud800"  # JSON's "\ud800": no text in UTF-8
    save_samples(tmp_path, {"math": report_of([group])})
    assert json.loads((tmp_path / "math.jsonl").read_text())["answer"] == "\ud800"
