"""The soak in small form: random deployments reproduce the resident model's bits, and errors and hangs are detected."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from scripts.soak import CONFIGS, Forward, Text, count_ties, draft_error, random_model, recorded

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "soak.py"


def _soak(*words: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, SCRIPT, *map(str, words)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_a_few_deployments(tmp_path: Path) -> None:
    run = _soak("--requests", 1000, "--seed", 27, "--json", tmp_path / "found.json")
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["requests"] >= 1000
    assert found["cases"] == found["right"] == run.stdout.count(": right, ") > 0
    assert (found["wrong"], found["crashed"], found["hung"], found["failures"]) == (0, 0, 0, [])


@pytest.mark.slow
def test_what_hangs_is_counted_and_named(tmp_path: Path) -> None:
    run = _soak("--only", 0, "--seconds", 0.01, "--json", tmp_path / "found.json")
    assert run.returncode == 1
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["hung"], found["crashed"], found["right"]) == (1, 0, 0)
    assert "Timeout (" in run.stderr


@pytest.mark.parametrize(
    ("logits", "dtype", "ties", "line"),
    [
        ([0.0, 3.0, 3.0], "bf16", {"ties": 1}, ""),
        ([0.0, 3.0, 2.0], "bf16", {"near ties": 1}, ""),
        ([0.0, 3.0, 3.0], "fp32", {}, "row 0 parts at new token 0, where the plain model's token leads by 0.0"),
    ],
)
def test_drafts_part_in_bf16_alone(logits: list[float], dtype: str, ties: dict[str, int], line: str) -> None:
    plain = torch.tensor([[7, 1]]), [torch.tensor([logits])]
    assert count_ties(plain, torch.tensor([[7, 1]]), dtype) == ({}, "")
    assert count_ties(plain, torch.tensor([[7, 2]]), dtype) == (ties, line)


def test_the_resident_model_reads_what_was_verified() -> None:
    """Two prompts beyond a window of 16, one padded; two drafted tokens are verified, and one is wrong."""
    model, text = random_model(CONFIGS["gpt_oss"]), Text(kind="generate", start=0, lengths=(20, 17), new=4)
    ids_BS, mask_BS = torch.arange(1, 41).view(2, 20), torch.ones(2, 20, dtype=torch.long)
    ids_BS[1, :3], mask_BS[1, :3] = 0, 0
    with torch.no_grad(), recorded(model) as steps:
        right_BS = model.generate(ids_BS, attention_mask=mask_BS, max_new_tokens=4, do_sample=False)
        wrong_BS = right_BS.clone()
        wrong_BS[0, 22] += 1
        prompt, _, _, last = steps
        draft = Forward(begin=20, ids_BT=right_BS[:, 20:21], kept=1)
        verified = Forward(begin=20, ids_BT=wrong_BS[:, 20:23], kept=3)
        skipped = Forward(begin=20, ids_BT=right_BS[:, [20, 22]], kept=2)
        other = Forward(begin=0, ids_BT=ids_BS + 1, kept=1)
        end = int(right_BS[0, 21])
        for forwards, tokens_BS, ends, line in (
            (steps, right_BS, None, ""),
            ([prompt, draft, verified, last], right_BS, None, ""),
            ([prompt, draft, verified, last], wrong_BS, None, "row 0 has a new token 2 that is not the likeliest"),
            ([prompt, skipped, last], right_BS, None, "row 0 has a new token 2 that no forward says"),
            ([other, *steps[1:]], right_BS, None, "row 0 was fed other tokens"),
            (steps[:2], right_BS, None, "row 0 has a new token 2 that no forward says"),
            (steps[:2], right_BS[:1], end, ""),
        ):
            rows = Text(kind="generate", start=0, lengths=text.lengths[: len(tokens_BS)], new=4)
            own = [Forward(begin=one.begin, ids_BT=one.ids_BT[: len(tokens_BS)], kept=one.kept) for one in forwards]
            found = draft_error(model, rows, own, tokens_BS, ends)
            assert found.startswith(line), (line, found)
            assert bool(found) == bool(line)
