"""What a command that serves does with --warm and --hot-experts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from expertcast.commands.deployment import WarmOptions
from expertcast.data.models import load_tokenizer
from expertcast.predictors import ExpertcastError
from expertcast.runtime import load_offloaded


def test_a_run_leaves_its_hot_experts_however_it_ends(tmp_path: Path) -> None:
    prompts, hot = tmp_path / "prompts.txt", tmp_path / "hot.json"
    prompts.write_text("In the beginning\n")
    options, tokenizer = WarmOptions(warm=prompts, hot_experts=hot), load_tokenizer("reference")
    with load_offloaded("reference", slots=96) as offloaded:
        running = options.warmed(offloaded, tokenizer, options.prompts())
        assert [line.partition(" ")[0] for line in running.__enter__()] == ["hot", "warmed"]
        assert not hot.exists()
        stopped = KeyboardInterrupt()
        assert not running.__exit__(KeyboardInterrupt, stopped, None)
        assert hot.exists()
        held = set(offloaded.pool.resident())
    options = WarmOptions(hot_experts=hot)
    assert options.prompts() == []
    with load_offloaded("reference", slots=96) as offloaded, options.warmed(offloaded, tokenizer, []) as said:
        assert said[0].startswith(f"hot experts: {len(held)} loaded from ")
        assert set(offloaded.pool.resident()) == held


def test_what_failed_first_is_the_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Hot experts that cannot be written are a line beside it; where nothing else failed they are the error."""
    options, tokenizer = WarmOptions(hot_experts=tmp_path / "none" / "hot.json"), load_tokenizer("reference")
    with load_offloaded("reference", slots=96) as offloaded:

        def serve(error: Exception | None) -> None:
            with options.warmed(offloaded, tokenizer, []):
                offloaded(input_ids=torch.tensor([[5, 6]]))
                if error is not None:
                    raise error

        with pytest.raises(RuntimeError, match="port is taken"):
            serve(RuntimeError("port is taken"))
        assert "hot experts are not written: " in capsys.readouterr().err
        with pytest.raises(ExpertcastError, match="none"):
            serve(None)


def test_a_missing_file_of_prompts_is_refused_before_a_model_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(ExpertcastError, match="cannot read"):
        WarmOptions(warm=tmp_path / "none").prompts()
