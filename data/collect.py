"""Collect traces: run a model over text once and store residuals, router logits and default vectors."""

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
from expertcast.data.models import check_token_ids
from expertcast.data.plan import SPLITS, Plan, PlannedDocument, TextOptions, Window, make_plan, pad_windows
from expertcast.data.processes import Share, documents_of, join_ranks, wait_for_all
from expertcast.data.skeleton import check_code
from expertcast.data.stand_in import KeptOutputs, fit_stand_in, stand_in_nbytes, with_rank
from expertcast.data.text import Document
from expertcast.data.trace_format import Columns, columns_of, read_info, row_bytes, write_info
from expertcast.data.trace_writer import (
    REMEDY,
    SHARD_BYTES,
    RankWriter,
    check_disk,
    check_settings,
    claim,
    merged_progress,
    new_info,
    publish,
    read_stand_in,
    write_stand_in,
)
from expertcast.data.traces import TraceDataset
from expertcast.predictors.artefacts import digest, write_atomically
from expertcast.predictors.early_attention import StandIn
from expertcast.predictors.messages import ExpertcastError, Json, format_bytes


def collect(
    model: PreTrainedModel | Offload,
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[Document],
    out: Path | str,
    options: TextOptions | None = None,
    *,
    stand_in: StandIn | None = None,
    shard_bytes: int = SHARD_BYTES,
    **fields: object,
) -> TraceDataset:
    """Collect traces into `out`, or resume a collection there.

    Under torchrun, each rank processes its share of the documents and the shards form one dataset. An estimate of the
    disk space and the progress appear on standard error.

    Args:
        model: model to run, unchanged afterwards. An offloaded model (or its offload) yields the same traces: it reads
            each expert once per forward, and by default runs as many windows per forward as fit next to the slots.
        tokenizer: the model's tokenizer.
        documents: the text.
        out: folder to write.
        options: amount of text and batching; default: :class:`TextOptions`.
        stand_in: stand-in of early attention, whose rank replaces `early_rank`; None fits one. A predictor that reads
            early attention can be scored on traces with its own stand-in only.
        shard_bytes: largest size of a shard in bytes. A killed process loses as much, or its last forward.
        fields: fields of :class:`TextOptions` that replace those of `options`, such as `tokens`.

    Returns:
        The traces.

    Raises:
        ExpertcastError: the model is not supported, there are too few documents, `out` contains other files or a
            collection with other settings, or the disk is too small.

    Example:
        >>> import expertcast
        >>> from expertcast.data.models import load_model, load_tokenizer
        >>> model, tokenizer = load_model("reference"), load_tokenizer("reference")
        >>> documents = expertcast.load_documents("reference")
        >>> expertcast.collect(model, tokenizer, documents, "traces", tokens=600, early_rank=None)
        TraceDataset('reference', train=..., validation=..., test=..., layers=12, experts=64, top_k=4, hidden=192)
    """
    share = join_ranks()
    model, folder = model_of(model), Path(out)
    check_code(model)
    experts = experts_of(model)
    view = experts.view
    if stand_in is not None:
        fields["early_rank"] = stand_in.rank
    plan = with_rank(make_plan(documents, tokenizer, options, **fields), view)
    check_token_ids(plan.token_ids, model.config, tokenizer)
    beside = stand_in_nbytes(view, plan.early_rank)
    batch_size = plan.options.batch_size or _begun_with(folder) or experts.windows(plan.options.window, beside)
    early, seen = try_early(model, view, plan)
    columns = columns_of(view.shape, seen.logits_TLE.dtype, early=early is not None)
    stream = ActivationStream(model, view, plan.windows_of(plan.documents), batch_size=batch_size)
    kept = KeptOutputs(folder / layout.PROGRESS_FOLDER)
    mark = "" if stand_in is None else digest(save(stand_in.state_dict()))
    new = new_info(columns, _settings(stream, plan, share, early), plan.account(view), mark)
    if share.rank == 0:
        if claim(folder, new, view, json.loads(model.config.to_json_string())) is None:
            write_info(folder, new)
        shape = view.shape
        defaults = 4 * shape.layers * shape.experts * shape.hidden
        line, free = check_disk(folder, plan.token_count(), row_bytes(columns), defaults + (beside if early else 0))
        forwards = len(list(_batches(plan, plan.documents, batch_size)))
        print(f"{line}; {forwards} forwards of {batch_size} windows", file=sys.stderr)
        if early is not None and not (folder / layout.STAND_IN_FILE).exists():
            start, train, rank = time.perf_counter(), plan.windows["train"], plan.early_rank or 0
            needed = kept.nbytes(view, train, batch_size, model.dtype.itemsize, rank)
            keep = kept if share.world == 1 and needed < free else None
            if keep is not None:
                print(f"experts' outputs: {format_bytes(needed)} on disk until the end", file=sys.stderr)
            fitted = stand_in or fit_stand_in(model, view, train, rank=rank, batch_size=batch_size, keep=keep)
            write_stand_in(folder, fitted)
            del fitted  # it is read again below, and takes .2 GB at 48 layers x 128 experts
            write_info(folder, {**new, "collection_s": time.perf_counter() - start})
    wait_for_all(share)
    info = read_info(folder)
    if info is None:
        raise ExpertcastError(f"rank {share.rank} cannot read {folder}: ranks need a shared file system")
    check_settings(folder, info, new)
    if not info["complete"]:
        writer = RankWriter(folder, MeanOutputs(view), rank=share.rank, columns=columns, shard_bytes=shard_bytes)
        if early is not None:
            kept_stand_in = read_stand_in(folder, view.shape, plan.early_rank or 0)
            if stand_in is not None and not kept_stand_in.equals(stand_in):
                raise ExpertcastError(f"{folder} was begun with another stand-in: use another folder")
            stream.early = EarlyRun(early, kept_stand_in.to(model.device), dict(early.refused))
        _run(stream, plan, share, writer, kept)
        wait_for_all(share)
        if share.rank == 0:
            _finish(folder, dict(info), stream, plan, columns, share)
    if share.rank == 0:
        shutil.rmtree(folder / layout.PROGRESS_FOLDER, ignore_errors=True)
    wait_for_all(share)
    return TraceDataset.open(folder)


def _run(stream: ActivationStream, plan: Plan, share: Share, writer: RankWriter, kept: KeptOutputs) -> None:
    """Run the batches that are not committed yet; `kept` has expert outputs saved by the fit of the stand-in."""
    own = documents_of(plan.documents, share)
    total = sum(document.tokens for document in own)
    label = "collecting" if share.world == 1 else f"collecting, rank {share.rank}"
    batches = islice(enumerate(_batches(plan, own, stream.batch_size)), writer.done["batches"], None)
    with tqdm(total=total, initial=writer.done["rows"], unit="token", desc=label, unit_scale=True) as bar:
        for number, (split, windows) in batches:
            batch = pad_windows(windows)
            stream.means = writer.means if split == "train" else None  # predictors must not learn from held-out text
            writer.append(stream.run(batch, kept.of(number, batch)))
            bar.update(len(batch))
    writer.commit()


def _batches(plan: Plan, own: Sequence[PlannedDocument], batch_size: int) -> Iterator[tuple[str, list[Window]]]:
    """Yield split and windows of each forward; a batch never mixes splits."""
    for split in SPLITS:
        windows = plan.windows_of(own, split)
        for begin in range(0, len(windows), batch_size):
            yield split, windows[begin : begin + batch_size]


def _settings(stream: ActivationStream, plan: Plan, share: Share, early: EarlyAttention | None) -> Json:
    """Return the settings that must be unchanged for a collection to resume."""
    return {
        "fingerprint": stream.view.fingerprint(),
        "dtype": str(stream.model.dtype).removeprefix("torch."),
        "window": plan.options.window,
        "tokens": plan.token_count(),
        "batch_size": stream.batch_size,
        "ranks": share.world,
        "text": plan.digest,
        "early_rank": None if early is None else plan.early_rank,
        "not_early": [] if early is None else [layer for layer in sorted(early.refused) if layer],
    }


def _begun_with(folder: Path) -> int | None:
    """Return the windows per forward of the collection in the folder, if there is one."""
    begun = read_info(folder) if folder.is_dir() else None
    return None if begun is None else int(begun["settings"]["batch_size"])


def _finish(folder: Path, info: Json, stream: ActivationStream, plan: Plan, columns: Columns, share: Share) -> None:
    """Merge the ranks' results and mark the dataset complete; safe to repeat."""
    view = stream.view
    means = [MeanOutputs(view) for _ in range(share.world)]
    done = merged_progress(folder, means)
    if done["rows"] != plan.token_count():
        raise ExpertcastError(f"{folder}: {done['rows']} rows instead of {plan.token_count()} tokens; {REMEDY}")
    defaults = means[0].default_vectors(experts_of(stream.model, view))
    write_atomically(folder / layout.DEFAULTS_FILE, save(defaults.as_tensors()))
    info["collection_s"] = info.get("collection_s", 0.0) + done["seconds"]
    publish(folder, info, plan.documents, columns, done["shards"])
