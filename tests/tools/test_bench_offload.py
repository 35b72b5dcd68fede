"""The benchmark of a trainer's way to the host and back, whole on a tiny model on the CPU."""
import json

import pytest

from tests.torchrun import ROOT, torchrun
from tools.bench_offload import BACK, BARE_BACK, BARE_OUT, OUT


def test_each_way_is_compared_with_bare_copies_of_the_same_bytes(tmp_path):
    output = torchrun(ROOT / "tools" / "bench_offload.py", 1, "--device", "cpu", "--shape", "tiny", "--rounds", "1",
                      "--json", str(tmp_path / "figures.jsonl"))
    record = json.loads((tmp_path / "figures.jsonl").read_text())
    rows = {row["what"]: row for row in record["rows"]}
    assert list(rows) == [OUT, BACK, BARE_OUT, BARE_BACK]
    for name, bare in ((OUT, BARE_OUT), (BACK, BARE_BACK)):
        assert rows[name]["to"] == bare and rows[name]["value"] > 0
        assert rows[name]["ratio"] == pytest.approx(rows[name]["value"] / rows[bare]["value"])
    # Weights in bfloat16, masters and two moments in fp32: 14 bytes a parameter, of about 400,000.
    assert "1 ranks, 0.01 GB a rank" in record["setting"] and "GB/s" in output
