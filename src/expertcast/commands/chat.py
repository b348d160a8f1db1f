"""`expertcast chat`: a conversation in the terminal with a model whose experts are offloaded."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Annotated, Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, StoppingCriteria, StoppingCriteriaList

from expertcast.commands.generate import (
    GenerationOptions,
    TimedStreamer,
    account,
    chat_inputs,
    conversation,
    held,
)
from expertcast.commands.options import Count, Option
from expertcast.commands.output import Outcome, offload_lines, say
from expertcast.predictors import ExpertcastError
from expertcast.predictors.messages import Json

HELP = "/stats: speed and memory of the last answer; /reset: new conversation; Ctrl-C ends an answer, Ctrl-D the chat"


@dataclass(frozen=True, kw_only=True)
class Options(GenerationOptions):
    """Options of `expertcast chat`."""

    system: Annotated[str | None, Option(metavar="P")] = None
    """System prompt."""
    new_tokens: Count = 1024
    """Largest number of tokens of an answer."""


def run(options: Options) -> Outcome:
    """Load the model offloaded and answer lines of standard input until it ends."""
    with suppress(ImportError):
        import readline  # noqa: F401  `input` then edits lines and keeps a history

    config, tokenizer = options.configuration(), options.tokenizer(options.model)
    if tokenizer.chat_template is None:
        if options.system is not None:
            raise ExpertcastError(f"the tokenizer of {options.model!r} has no chat template: leave --system out")
        say(f"{options.model!r} has no chat template: answers continue the text of all lines")
    with options.generator(config, tokenizer) as (offloaded, generate), Interrupt().handled() as interrupt:
        limit = getattr(offloaded.model.config.get_text_config(), "max_position_embeddings", None)
        most, reuse = min(config.context, limit or config.context), config.draft == "none"
        chat = Chat(options, tokenizer, generate, interrupt, most=most, reuse=reuse)
        for line in [*offload_lines(offloaded, config), HELP]:
            say(line)
        for line in interrupt.lines():
            if line == "/reset":
                chat.reset()
            elif line == "/stats":
                say("\n".join(account(chat.timing, offloaded.stats.as_dict(), held(offloaded))))
            elif line.startswith("/"):
                say(f"unknown command {line}: {HELP}")
            else:
                offloaded.reset_stats()
                chat.answer(line)
        last = {"timing": chat.timing, "stats": offloaded.stats.as_dict()}
    result = {"answers": chat.answers, "generated_tokens": chat.tokens, **last}
    return result, f"{chat.answers} answer{'s' * (chat.answers != 1)}, {chat.tokens} tokens"


class _Stopped(KeyboardInterrupt):
    """Ctrl-C; SIGTERM raises the class itself and ends the command."""


class Interrupt(StoppingCriteria):  # type: ignore[misc]
    """Ends an answer after its current token on Ctrl-C, and at once on a second one."""

    def __init__(self) -> None:
        self.answering = self.received = False

    def __call__(self, input_ids: Tensor, _scores: object, **_: object) -> Tensor:
        return torch.full((len(input_ids),), self.received, device=input_ids.device)

    @contextmanager
    def handled(self) -> Iterator[Interrupt]:
        """Handle SIGINT. A timer has Python look for signals: `input` misses one between its prompt and its wait."""
        before = [(number, signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGALRM)]
        signal.signal(signal.SIGINT, self._handle)
        signal.signal(signal.SIGALRM, lambda *_: None)
        try:
            yield self
        finally:
            for number, handler in before:
                signal.signal(number, handler)

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        if not self.answering or self.received:
            raise _Stopped
        self.received = True

    def lines(self) -> Iterator[str]:
        """Yield the lines of standard input that are not blank; one that ends in a backslash includes the next."""
        while True:
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
                try:
                    text = input("> ")
                    while text.endswith("\\"):
                        text = f"{text[:-1]}\n{input('. ')}"
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            except _Stopped:
                print()
            except EOFError:
                print()
                return
            else:
                if re.search("[\ud800-\udfff]", text):  # bytes of another encoding
                    say("this line is not valid Unicode: write it in UTF-8")
                elif text.strip():
                    yield text


class Chat:
    """A conversation.

    Args:
        options: options of the command.
        tokenizer: the model's own. Without a template the conversation is one text.
        generate: generates from `input_ids`.
        interrupt: ends an answer.
        most: tokens of the longest conversation.
        reuse: whether `generate` takes and returns keys and values, so that only new tokens run.
    """

    def __init__(
        self, options: Options, tokenizer: PreTrainedTokenizerBase, generate: Callable[..., Any], interrupt: Interrupt,
        *, most: int, reuse: bool,
    ) -> None:  # fmt: skip
        self._options, self._tokenizer, self._generate, self._interrupt = options, tokenizer, generate, interrupt
        self._most, self._reuse = most, reuse
        self.timing: Json = TimedStreamer(tokenizer, skip_prompt=True).as_dict()
        """Timing of the last answer."""
        self.answers = self.tokens = 0
        """Number of answers, and of their tokens."""
        self.reset()

    def reset(self) -> None:
        """Begin a new conversation."""
        self._messages = conversation(self._options.system)
        self._text = list[int]()
        """Tokens of prompt and answers."""
        self._cache: tuple[list[int], Any] | None = None
        """Tokens whose keys and values are known, and these."""

    def answer(self, line: str) -> None:
        """Print the model's answer to a line, word by word."""
        messages = [*self._messages, *conversation(None, line)]
        if self._tokenizer.chat_template is None:
            ids = self._text + self._tokenizer(line, add_special_tokens=not self._text)["input_ids"]
        else:
            inputs = chat_inputs(self._tokenizer, messages, self._options.model, "begin again")
            ids = inputs["input_ids"][0].tolist()
        room = min(self._most - len(ids), self._options.new_tokens)
        if room < 1:
            say(f"{len(ids)} tokens fill the conversation's {self._most}: /reset, or start with a larger --context")
            return
        streamer = TimedStreamer(self._tokenizer, skip_prompt=True)
        self._interrupt.answering, self._interrupt.received = True, False
        try:
            self._text = self._run(ids, room, streamer)
        except _Stopped:
            self._cache = None  # its layers may hold different tokens
            print()
            return
        finally:
            self._interrupt.answering = False
        made = self._tokenizer.decode(self._text[len(ids) :], skip_special_tokens=True)
        self._messages = [*messages, {"role": "assistant", "content": made}]
        self.timing = streamer.as_dict()
        self.answers, self.tokens = self.answers + 1, self.tokens + len(self._text) - len(ids)

    def _run(self, ids: list[int], room: int, streamer: TimedStreamer) -> list[int]:
        """Return prompt and answer, and keep their keys and values."""
        known, cache = self._cache or ([], None)
        options: dict[str, Any] = {}
        if cache is not None and ids[: len(known)] == known and len(known) < len(ids):
            options["past_key_values"] = cache
        if self._reuse:
            options["return_dict_in_generate"] = True
        given = torch.tensor([ids], device=self._options.device_name)
        output = self._generate(
            input_ids=given, attention_mask=torch.ones_like(given), max_new_tokens=room, streamer=streamer,
            stopping_criteria=StoppingCriteriaList([self._interrupt]), **options,
        )  # fmt: skip
        if not self._reuse:
            return list(output[0].tolist())
        tokens: list[int] = output.sequences[0].tolist()
        self._cache = tokens[:-1], output.past_key_values  # the last token has not run
        return tokens
