"""Merging metrics of microbatches and ranks."""
import torch

from mrl.trainer.metrics import merge, sum_metrics


def test_sums_and_maxima():
    reports = [{"loss": torch.tensor(1.5), "ratio_max": torch.tensor(2.0)},
               {"loss": torch.tensor(2.0), "ratio_max": torch.tensor(-1.0), "clipped": torch.tensor(3)}]
    assert sum_metrics(reports) == {"loss": 3.5, "ratio_max": 2.0, "clipped": 3.0}
    assert sum_metrics([]) == {}


def test_ranks_without_metrics_do_not_count():
    assert merge([{}, {"kl_max": -2.0, "n": 1.0}, {}, {"kl_max": -3.0, "n": 2.0}]) == {"kl_max": -2.0, "n": 3.0}
