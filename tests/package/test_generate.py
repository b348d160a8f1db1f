"""`expertcast generate`, and the options that fill slots before the first request."""

from __future__ import annotations

import fcntl
import io
import os
import select
import signal
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from expertcast.checkpoints.bundled import resolve_model
from expertcast.cli import main
from expertcast.commands import serve
from expertcast.commands.chat import Interrupt
from expertcast.data.models import load_model
from expertcast.predictors.messages import format_bytes, install_command
from expertcast.runtime.storage.expert_file import FILE_NAME, read_header
from tests.package.test_cli import fails, ran

PROMPT = "It is a truth"
SHORT = ["--prompt", PROMPT, "--slots", "192", "--new-tokens", "12"]
ASKED = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
TEMPLATE = ASKED + "{% if add_generation_prompt %}<me>{% endif %}"


def generated(tmp_path: Path, *words: str, model: str = "reference") -> dict[str, Any]:
    return ran(tmp_path, f"generate {model}", *SHORT, *words)


class Recorder:
    """A standard output that keeps what is written, with how many forwards there were before."""

    def __init__(self) -> None:
        self.forwards = 0
        self.writes: list[tuple[int, str]] = []

    def write(self, text: str) -> int:
        self.writes.append((self.forwards, text))
        return len(text)

    def flush(self) -> None:
        pass


def test_words_come_while_the_model_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    recorder = Recorder()

    def count(module: nn.Module, _args: object, _output: object) -> None:
        recorder.forwards += isinstance(module, PreTrainedModel) and hasattr(module, "lm_head")

    monkeypatch.setattr(sys, "stdout", recorder)
    hook = nn.modules.module.register_module_forward_hook(count)
    try:
        found = generated(tmp_path)
    finally:
        hook.remove()
    text = "".join(written for _, written in recorder.writes)
    assert text.startswith(found["text"] + "\n\n12 tokens, ")
    assert text.count(found["text"]) == 1
    words = [forwards for forwards, written in recorder.writes if written.strip()]
    assert recorder.forwards == 12
    assert words[0] == 0  # the prompt
    assert {1, 2} & set(words)
    assert len(set(words)) > 4


def test_what_it_took(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = generated(tmp_path, "--bandwidth", "1e9", "--predictor", "next_norm")
    speed, experts, slots, forecasts = capsys.readouterr().out.rstrip("\n").splitlines()[-4:]
    stats, memory, timing = found["stats"], found["memory"], found["timing"]
    assert timing["new_tokens"] == 12
    assert speed.startswith(f"12 tokens, {timing['ttft_s']:.2f} s to the first, {timing['tokens_per_s']:.1f} tokens/s")
    assert f"{stats['hits']:,} of {stats['requests']:,} requests hit ({stats['hit_rate']:.1%})" in experts
    assert stats["bytes_moved"] == sum(layer["bytes_moved"] for layer in stats["per_layer"]) > 0
    expert = 3 * 96 * 64 * 2  # bytes of gate, up and down in bf16
    assert memory["store_bytes"] == 768 * expert
    assert memory["device_bytes"] == 192 * expert
    assert slots.startswith("slots: 192 of 768 experts, ")
    assert slots.endswith("in memory, 16 bits a weight; link emulated at 1 GB/s")
    made = found["stats"]["forecasts"]["1"]["rungs"]["next_norm"]["made"]
    assert forecasts.startswith(f"forecasts of exact: {made} by next_norm; left out: ")


def test_why_there_are_no_forecasts(capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny_folder: str) -> None:
    def said(*words: str) -> str:
        generated(tmp_path, *words, model=tiny_folder)
        return capsys.readouterr().out.rstrip("\n").splitlines()[-1]

    few = ("--slots", "8")
    none = "forecasts: none, link 'instant' copies in the model's thread and can hide nothing; "
    assert said(*few, "--predictor", "next_norm").startswith(none)
    for words in (few, (*few, "--predictor", "next_norm", "--forecasts", "always")):
        assert said(*words).startswith("slots: 8 of 32 experts, ")
    executed = said(*few, "--predictor", "next_norm", "--mode", "speculate")
    assert executed.startswith("slots: 8 of 32 experts, ")
    assert said("--slots", "1024", "--predictor", "next_norm") == "all 32 experts fit: nothing is offloaded"


def test_bytes_read_from_a_compressed_store(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Beside the bytes moved, which are those of expanded experts."""
    reads: list[int] = []  # several threads read: an append is atomic
    preadv = os.preadv

    def counted(*given: Any) -> int:
        came = preadv(*given)
        if Path(f"/proc/self/fd/{given[0]}").resolve().name == FILE_NAME:
            reads.append(came)
        return came

    stored = ["--store-folder", str(tmp_path / "store")]
    assert main(["store", "reference", *stored]) == 0
    monkeypatch.setattr(os, "preadv", counted)
    found = generated(tmp_path, *stored)
    stats, memory = found["stats"], found["memory"]
    shown = capsys.readouterr().out
    read = sum(reads) - read_header(tmp_path / "store" / FILE_NAME).index_nbytes
    assert memory["bytes_read"] == read > 0
    assert memory["bytes_read"] < 0.8 * stats["bytes_moved"]
    assert f" a token), {format_bytes(read)} read from disk, " in shown


def test_drafts_stream_the_same_text(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plain = generated(tmp_path)
    capsys.readouterr()
    drafted = generated(tmp_path, "--draft", "int4", "--draft-length", "3")
    assert drafted["tokens"] == plain["tokens"]
    said = capsys.readouterr().out
    assert said.startswith(plain["text"] + "\n\n")
    assert f"drafts {drafted['memory']['draft_bytes'] / 1e6:.3g} MB" in said


@torch.no_grad()
def test_samples(tmp_path: Path, tiny_folder: str, reference_tokenizer: Any) -> None:
    """Those of transformers on the resident model, from the same seed."""
    sampling = ["--slots", "16", "--temperature", "0.9", "--top-p", "0.8", "--seed"]
    sampled = generated(tmp_path, *sampling, "5", model=tiny_folder)["tokens"]
    inputs = reference_tokenizer(PROMPT, return_tensors="pt")
    torch.manual_seed(5)
    expected = load_model(tiny_folder).generate(
        **inputs, max_new_tokens=12, do_sample=True, temperature=0.9, top_p=0.8, top_k=0
    )
    assert sampled == expected[0].tolist()
    assert sampled != generated(tmp_path, *sampling, "6", model=tiny_folder)["tokens"]


@pytest.fixture
def chatting(tmp_path: Path) -> Path:
    """The bundled model with a chat template."""
    folder = tmp_path / "chatting"
    folder.mkdir()
    for path in Path(resolve_model("reference")).iterdir():
        (folder / path.name).symlink_to(path)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def test_chat(capsys: pytest.CaptureFixture[str], chatting: Path, tmp_path: Path, reference_tokenizer: Any) -> None:
    found = generated(tmp_path, "--chat", "--system", "Be brief.", model=str(chatting))
    asked = reference_tokenizer(f"<system>Be brief.\n<user>{PROMPT}\n<me>")["input_ids"]
    assert found["tokens"][: len(asked)] == asked
    answer = reference_tokenizer.decode(found["tokens"][len(asked) :], skip_special_tokens=True)
    assert capsys.readouterr().out.startswith(f"{answer}\n\n")
    (chatting / "chat_template.jinja").write_text(
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + TEMPLATE
    )
    said = fails(capsys, "generate", str(chatting), *SHORT, "--chat", "--system", "Be brief.")
    assert said.endswith("refuses this: no system role; leave --system out")


def test_lines_of_another_encoding(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """No tokenizer takes what Python reads for such bytes."""
    raw = io.BytesIO("caf\u00e9\n".encode("latin-1") + "caf\u00e9\n \n".encode())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(raw, encoding="utf-8", errors="surrogateescape"))
    assert list(Interrupt().lines()) == ["caf\u00e9"]
    assert capsys.readouterr().err == "this line is not valid Unicode: write it in UTF-8\n"


class Terminal:
    """A process on a pseudo-terminal."""

    def __init__(self, *words: str) -> None:
        own, other = os.openpty()
        command, plain = [sys.executable, "-m", "expertcast.cli", *words], {**os.environ, "TERM": "dumb"}
        self.process = subprocess.Popen(
            command, stdin=other, stdout=other, stderr=other, start_new_session=True, env=plain,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(other)
        self._own, self._seen = own, ""

    def until(self, text: str) -> str:
        """Read up to a text; return what came before it."""
        while text not in self._seen:
            assert select.select([self._own], [], [], 100)[0], self._seen
            self._seen += os.read(self._own, 4096).decode().replace("\r", "")
        found, _, self._seen = self._seen.partition(text)
        return found

    def write(self, text: str) -> None:
        os.write(self._own, text.encode())

    def interrupt(self) -> None:
        """Press Ctrl-C at the prompt until another follows: `input` misses one between its prompt and its wait."""
        self.write("\3")
        while not select.select([self._own], [], [], 10)[0]:
            self.write("\3")
        self.until("\n> ")


def test_chat_in_a_terminal(chatting: Path, tmp_path: Path, reference_tokenizer: Any) -> None:
    """Ctrl-C ends an answer alone; keys and values of the conversation are those of a run of the whole of it."""
    prompts, answers = [PROMPT, "And then?"], list[str]()
    terminal = Terminal("chat", str(chatting), "--slots", "192", "--new-tokens", "6", "--system", "Be brief.")
    for number, prompt in enumerate(prompts):
        terminal.until("> ")
        terminal.write(f"{prompt}\n")
        terminal.until(f"{prompt}\n")
        answers.append(terminal.until("\n> ").strip())
        asked = f"<system>Be brief.\n<user>{PROMPT}\n"
        if number:
            asked += f"<assistant>{answers[0]}\n<user>{prompts[1]}\n"
        found = ran(tmp_path, f"generate {chatting} --slots 192 --new-tokens 6", "--prompt", f"{asked}<me>")
        assert found["text"].endswith(answers[-1])
        terminal.write("/stats\n")
        assert " tokens, " in terminal.until("in memory, 16 bits a weight")
    terminal.until("\n> ")  # before it, the terminal takes Ctrl-D for itself
    terminal.write("\4")
    terminal.until("2 answers, 12 tokens")
    assert terminal.process.wait() == 0

    terminal = Terminal("chat", "reference", "--slots", "192", "--new-tokens", "100000")
    terminal.until("no chat template: answers continue the text of all lines")
    for _ in range(2):
        terminal.until("> ")
        terminal.write(f"{PROMPT}\n")
        terminal.until(f"{PROMPT}\n")
        terminal.until(" ")
        terminal.write("\3")
        terminal.until("\n> ")
        terminal.interrupt()
        terminal.write("/reset\n")
        terminal.until("/reset\n")  # the next prompt is the one after it
    terminal.until("> ")
    terminal.process.send_signal(signal.SIGTERM)
    terminal.until("expertcast: interrupted")
    assert terminal.process.wait() == 143


def test_chat_writes_what_the_last_answer_took(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("It is\nAnd\n"))
    found = ran(tmp_path, "chat reference --slots 192 --new-tokens 3")
    assert (found["answers"], found["generated_tokens"], found["timing"]["new_tokens"]) == (2, 6, 3)
    assert found["stats"]["requests"] > 0


def test_serving_without_its_extra(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve.importlib.util, "find_spec", lambda _name: None)
    assert fails(capsys, "serve", "reference").endswith(f": {install_command('serve')}")
