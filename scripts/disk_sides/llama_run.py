"""The process of one run of llama.cpp: the mapped GGUF, the same tokens forced. Started by `runs.py`."""

from __future__ import annotations

import ctypes
import statistics
import time

from disk_sides.child import begin, bytes_read, finish, ready, timed_part

SPEC = begin()  # before its libraries are loaded

# ruff: noqa: E402
import llama_cpp
import numpy as np


def main() -> None:
    """Load, read the prompt at once, then the text token by token."""
    prompt, rest = timed_part(SPEC)
    llama_cpp.llama_log_set(_silent, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    options = llama_cpp.llama_model_default_params()
    options.n_gpu_layers, options.use_mmap, options.use_mlock = 0, True, False
    options.use_extra_bufts = False  # a repacked copy would be memory of its own
    model = llama_cpp.llama_model_load_from_file(SPEC["gguf"].encode(), options)
    if not model:
        raise SystemExit("llama.cpp cannot load the file")
    settings = llama_cpp.llama_context_default_params()
    settings.n_ctx, settings.n_batch, settings.n_ubatch = 256, 64, 64
    settings.n_threads = settings.n_threads_batch = SPEC["threads"]
    context = llama_cpp.llama_init_from_model(model, settings)
    vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    ready()
    before, start = bytes_read(), time.perf_counter()
    _decode(context, prompt)
    ttft_s, prompt_bytes = time.perf_counter() - start, bytes_read() - before
    largest, steps_s = [], []
    for number, token in enumerate(rest):
        if number == SPEC["warm"]:
            before = bytes_read()
        start = time.perf_counter()
        _decode(context, [token])
        logits = llama_cpp.llama_get_logits_ith(context, -1)
        largest.append(int(np.ctypeslib.as_array(logits, shape=(vocabulary,)).argmax()))
        steps_s.append(time.perf_counter() - start)
    steps_s = steps_s[SPEC["warm"] :]
    found = {
        "ttft_s": ttft_s, "prompt_bytes_read": prompt_bytes, "steps_s": steps_s, "tpot_s": statistics.median(steps_s),
        "tpot_mean_s": statistics.fmean(steps_s), "bytes_read": (bytes_read() - before) / len(steps_s),
        "largest": largest, "version": llama_cpp.__version__,
    }  # fmt: skip
    finish(SPEC, found)


def _decode(context: object, tokens: list[int]) -> None:
    array = (llama_cpp.llama_token * len(tokens))(*tokens)
    status = llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(array, len(tokens)))
    if status:
        raise SystemExit(f"llama_decode says {status}")


@llama_cpp.llama_log_callback
def _silent(_level: int, _text: bytes, _data: object) -> None:
    """Its log is not wanted."""


if __name__ == "__main__":
    main()
