"""What benchmarks share: ways that take turns, figures that survive their file, lengths; and what is made of runs."""
import json

import pytest
import torch

from tools import measure, runs
from tools.measure import Record, Row, alternate
from tools.workload import SHORTEST, long_tailed, random_model


def test_ways_take_turns_and_the_first_round_is_not_counted():
    order, values = [], {"a": iter([9.0, 1.0, 5.0, 2.0]), "b": iter([0.0, 4.0, 4.0, 3.0])}

    def way(name):
        def run():
            order.append(name)
            return next(values[name])
        return run

    assert alternate({name: way(name) for name in values}, 3) == {"a": 2.0, "b": 4.0}
    assert order == ["a", "b", "b", "a"] * 2


def test_figures_are_appended_and_shown_in_one_table(tmp_path, capsys, monkeypatch):
    path = tmp_path / "figures.jsonl"
    for tool in ("one", "two"):
        Record(tool, "a setting", [Row("way", 1234.5, "tokens/s", 0.5, "other", "notes")]).append(path)
    found = measure.read([path])
    assert [record.tool for record in found] == ["one", "two"] and found[0].rows[0].ratio == 0.5
    assert found[0].versions["torch"] == measure.versions()["torch"]
    measure.main([str(path)])
    printed = capsys.readouterr().out
    assert all(words in printed for words in ("one", "two", "0.500", "tokens/s", "a setting"))


def test_lengths_have_a_long_tail_and_stay_in_their_bounds():
    lengths = long_tailed(1000, 256, 1.0, 2048)
    assert lengths == long_tailed(1000, 256, 1.0, 2048) != long_tailed(1000, 256, 1.0, 2048, seed=2)
    assert min(lengths) == SHORTEST and max(lengths) == 2048
    assert 230 < sorted(lengths)[500] < 280 and sum(lengths) / 1000 > 1.25 * 256


def test_a_random_model_is_one_that_transformers_reads(tmp_path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(random_model(tmp_path / "model", "tiny", torch.device("cpu")))
    assert model.model.embed_tokens.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert bool((model.model.norm.weight == 1).all())


def write_run(folder, rewards):
    folder.mkdir()
    rows = [{"kind": "train", "step": step, "reward/mean": reward, "rollout/logprob_diff": 0.01 * step,
             "timing/step": 2.0} for step, reward in enumerate(rewards, 1)]
    rows += [{"kind": "eval", "step": step, "eval/heldout/acc/mean@1": step / 100, "eval/heldout/acc/mean@1/low": 0.0,
              "eval/heldout/by_level/low/acc/mean@1": 0.5} for step in (0, 20)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_runs_are_summed_up(tmp_path, capsys):
    write_run(tmp_path / "one", [0.0] * 10 + [1.0] * 10)
    runs.main([f"named={tmp_path / 'one'}", "--json", str(tmp_path / "figures.jsonl")])
    assert "named" in capsys.readouterr().out
    reward, accuracy, difference, step = measure.read([tmp_path / "figures.jsonl"])[0].rows
    assert (reward.value, reward.notes, accuracy.value) == (1.0, "first 0.000, each of 10 steps", 0.2)
    assert accuracy.what == "accuracy on heldout" and difference.value == pytest.approx(0.105) and step.value == 2.0


def test_the_last_row_of_a_step_counts(tmp_path):
    rows = [{"kind": "train", "step": step, "reward/mean": value} for step, value in ((1, 0.1), (2, 0.2), (2, 0.3))]
    assert runs.curve(rows, "train", "reward/mean") == ([1, 2], [0.1, 0.3])
    with pytest.raises(SystemExit, match="does not exist"):
        runs.read([str(tmp_path)])


def test_runs_are_drawn_into_one_picture(tmp_path):
    pytest.importorskip("matplotlib", reason="launch/requirements/plot.txt is not installed")
    from tools import plot_runs

    folders = [str(write_run(tmp_path / name, [0.1, 0.5, 0.9])) for name in ("one", "two")]
    plot_runs.main([*folders, "--out", str(tmp_path / "curves.png")])
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert plot_runs.smoothed([1.0, 2.0, 6.0, 4.0], 2) == [1.0, 1.5, 4.0, 5.0]
