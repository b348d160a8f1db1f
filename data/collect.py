"""`collect`: run a model over text once, and keep residuals, router logits and default vectors as traces."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from safetensors.torch import save
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from expertcast.data import trace_format as layout
from expertcast.data.capture import ActivationStream, EarlyRun, try_early
from expertcast.data.early import EarlyAttention
from expertcast.data.experts import Offload, experts_of, model_of
from expertcast.data.means import MeanOutputs
from expertcast.data.plan import SPLITS, Plan, PlannedDocument, TextOptions, Window, make_plan, pad_windows
from expertcast.data.processes import Share, documents_of, join_ranks, wait_for_all
from expertcast.data.skeleton import check_code
from expertcast.data.stand_in import KeptOutputs, fit_stand_in
from expertcast.data.text import Document
from expertcast.data.trace_format import Columns, columns_of, read_info, row_bytes, write_atomically, write_info
from expertcast.data.trace_writer import (
    REMEDY,
    SHARD_BYTES,
    RankWriter,
    check_settings,
    claim,
    merged_progress,
    new_info,
    publish,
    read_stand_in,
    write_stand_in,
)
from expertcast.data.traces import TraceDataset
from expertcast.predictors.messages import ExpertcastError, Json, size_text


def collect(
    model: PreTrainedModel | Offload,
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[Document],
    out: Path | str,
    options: TextOptions | None = None,
    *,
    shard_bytes: int = SHARD_BYTES,
    **fields: object,
) -> TraceDataset:
    """Write traces of a text to `out`, or finish a collection that was begun there.

    Under torchrun each rank takes its share of the documents and the shards become one dataset. An estimate of the disk
    it will use, and its progress, are shown on standard error.

    Args:
        model: is run; it stays as it is. One that is offloaded, or its offload, gives the same traces: each expert is
            read once per forward, and by default forwards take as many windows as fit beside the slots.
        tokenizer: the model's.
        documents: the text.
        out: the folder to write.
        options: how much of the text, and in which portions; none are the default :class:`TextOptions`.
        shard_bytes: size of a shard, which is also what a kill can cost.
        fields: fields of :class:`TextOptions` that are other than in `options`, such as `tokens`.

    Raises:
        ExpertcastError: model not supported, too few documents, `out` holds something else or was begun with other
            settings, or the traces do not fit the disk.
    """
    share = join_ranks()
    model, folder = model_of(model), Path(out)
    check_code(model)
    experts = experts_of(model)
    view = experts.view
    plan = make_plan(documents, tokenizer, options, **fields)
    batch_size = plan.options.batch_size or _begun_with(folder) or experts.windows(plan.options.window)
    early, seen = try_early(model, view, plan)
    columns = columns_of(view.shape, seen.logits_TLE.dtype, early=early is not None)
    stream = ActivationStream(model, view, plan.windows_of(plan.documents), batch_size=batch_size)
    kept = KeptOutputs(folder / layout.PROGRESS_FOLDER)
    new = new_info(columns, _settings(stream, plan, share, early), plan.account(view))
    if share.rank == 0:
        if claim(folder, new, view, json.loads(model.config.to_json_string())) is None:
            write_info(folder, new)
        free = _check_disk(folder, plan, row_bytes(columns))
        if early is not None and not (folder / layout.STAND_IN_FILE).exists():
            start, train, rank = time.perf_counter(), plan.windows["train"], plan.options.early_rank or 0
            room = share.world == 1 and kept.nbytes(view, train, batch_size, model.dtype.itemsize) < free
            keep = kept if room else None
            write_stand_in(folder, fit_stand_in(model, view, train, rank=rank, batch_size=batch_size, keep=keep))
            write_info(folder, {**new, "collection_s": time.perf_counter() - start})
    wait_for_all(share)
    info = read_info(folder)
    if info is None:
        raise ExpertcastError(f"rank {share.rank} does not see {folder}: ranks need a file system that they share")
    check_settings(folder, info, new)
    if not info["complete"]:
        writer = RankWriter(folder, MeanOutputs(view), rank=share.rank, columns=columns, shard_bytes=shard_bytes)
        if early is not None:
            stand_in = read_stand_in(folder, view.shape, plan.options.early_rank or 0).to(model.device)
            stream.early = EarlyRun(early, stand_in, dict(early.refused))
        _run(stream, plan, share, writer, kept)
        wait_for_all(share)
        if share.rank == 0:
            _finish(folder, dict(info), stream, plan, columns, share)
        wait_for_all(share)
    return TraceDataset.open(folder)


def _run(stream: ActivationStream, plan: Plan, share: Share, writer: RankWriter, kept: KeptOutputs) -> None:
    """Run the batches that are not committed yet.

    Args:
        stream: runs them.
        plan: of the collection.
        share: whose batches these are.
        writer: writes them.
        kept: what the experts put out in the first ones, when the stand-in was fitted.
    """
    own = documents_of(plan.documents, share)
    total = sum(document.tokens for document in own)
    label = "collecting" if share.world == 1 else f"collecting, rank {share.rank}"
    batches = islice(enumerate(_batches(plan, own, stream.batch_size)), writer.done["batches"], None)
    with tqdm(total=total, initial=writer.done["rows"], unit="token", desc=label, unit_scale=True) as bar:
        for number, (split, windows) in batches:
            batch = pad_windows(windows)
            stream.means = writer.means if split == "train" else None  # nothing a predictor knows is from held-out text
            writer.append(stream.run(batch, kept.of(number, batch)))
            bar.update(len(batch))
    writer.commit()


def _batches(plan: Plan, own: list[PlannedDocument], batch_size: int) -> Iterator[tuple[str, list[Window]]]:
    """(split, windows) per forward; a batch never mixes splits."""
    for split in SPLITS:
        windows = plan.windows_of(own, split)
        for begin in range(0, len(windows), batch_size):
            yield split, windows[begin : begin + batch_size]


def _settings(stream: ActivationStream, plan: Plan, share: Share, early: EarlyAttention | None) -> Json:
    """What must be the same for a collection to go on."""
    return {
        "fingerprint": stream.view.fingerprint(),
        "dtype": str(stream.model.dtype).removeprefix("torch."),
        "window": plan.options.window,
        "tokens": plan.token_count(),
        "batch_size": stream.batch_size,
        "ranks": share.world,
        "text": plan.digest,
        "early_rank": None if early is None else plan.options.early_rank,
        "not_early": [] if early is None else [layer for layer in sorted(early.refused) if layer],
    }


def _begun_with(folder: Path) -> int | None:
    """Windows per forward of a collection that was begun in the folder, if there is one."""
    begun = read_info(folder) if folder.is_dir() else None
    return None if begun is None else int(begun["settings"]["batch_size"])


def _check_disk(folder: Path, plan: Plan, row_bytes: int) -> int:
    """Print the estimate; refuse what does not fit.

    Returns:
        Bytes that are free beside it.
    """
    total = plan.token_count() * row_bytes
    there = sum(path.stat().st_size for path in folder.glob("data-*"))
    free = shutil.disk_usage(folder).free
    print(
        f"{folder}: {plan.token_count('all'):,} tokens of {row_bytes:,} bytes, about {size_text(total)} on disk "
        f"({size_text(there)} there already), {size_text(free)} free",
        file=sys.stderr,
    )
    if total - there > free:
        raise ExpertcastError(
            f"the traces need {size_text(total - there)} more in {folder} and {size_text(free)} are free: collect "
            "fewer tokens, choose another disk, or train online (expertcast train MODEL --data D), which stores nothing"
        )
    return free - (total - there)


def _finish(folder: Path, info: Json, stream: ActivationStream, plan: Plan, columns: Columns, share: Share) -> None:
    """Merge the ranks' work and mark the dataset complete; safe to repeat.

    Args:
        folder: of the dataset.
        info: its trace.json so far.
        stream: of its model.
        plan: what was run.
        columns: what was written of a token.
        share: how many ranks there were.
    """
    view = stream.view
    means = [MeanOutputs(view) for _ in range(share.world)]
    done = merged_progress(folder, means)
    if done["rows"] != plan.token_count():
        raise ExpertcastError(f"{folder}: {done['rows']} rows are written of {plan.token_count()} tokens; {REMEDY}")
    defaults = means[0].default_vectors(experts_of(stream.model, view))
    write_atomically(folder / layout.DEFAULTS_FILE, save(defaults.as_tensors()))
    info["collection_s"] = info.get("collection_s", 0.0) + done["seconds"]
    publish(folder, info, plan.documents, columns, done["shards"])
    shutil.rmtree(folder / layout.PROGRESS_FOLDER)
