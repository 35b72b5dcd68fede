from pathlib import Path

from mrl.cluster.trainers import next_attempt
from tests.torchrun import torchrun


def test_orders_and_scatter_between_four_ranks():
    torchrun(Path(__file__).with_name("gang_ranks.py"), 4)


def test_attempts_count_up_and_survive(tmp_path):
    assert [next_attempt(tmp_path / "attempt") for _ in range(3)] == [0, 1, 2]
