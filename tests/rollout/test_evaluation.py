from mrl.rollout.evaluation import evaluation_metrics
from mrl.rollout.types import Group, GroupRequest
from tests.rollout.groups import trajectory


def evaluated(group_id, outcomes):
    return Group(GroupRequest(group_id, group_id, 0, len(outcomes), "eval"), "p", "a",
                 [trajectory(reward=r, extracted=e) for e, r in outcomes])


def test_mean_best_and_majority():
    groups = [evaluated(0, [("4", 1.0), ("5", 0.0), ("4", 1.0), (None, 0.0)]),
              evaluated(1, [("7", 0.0), ("7", 0.0), ("8", 1.0), ("9", 0.0)])]
    metrics = evaluation_metrics(groups)
    assert metrics["eval/mean@4"] == (0.5 + 0.25) / 2
    assert metrics["eval/best@4"] == 1.0
    assert metrics["eval/maj@4"] == 0.5


def test_a_tie_goes_to_the_earlier_answer_and_no_answer_scores_nothing():
    assert evaluation_metrics([evaluated(0, [("1", 0.0), ("2", 1.0)])])["eval/maj@2"] == 0.0
    unanswered, answered = evaluated(0, [(None, 0.0), (None, 0.0)]), evaluated(1, [("1", 1.0), (None, 0.0)])
    assert evaluation_metrics([unanswered, answered])["eval/maj@2"] == 0.5


def test_a_reward_that_extracts_nothing_has_no_majority():
    assert "eval/maj@2" not in evaluation_metrics([evaluated(0, [(None, 0.0), (None, 1.0)])])
