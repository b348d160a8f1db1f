"""`collect`: run a model over text once, and keep residuals, router logits and default vectors as traces."""

from __future__ import annotations

import hashlib
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

from expertcast.data import layout
from expertcast.data.distributed import Share, documents_of, join_ranks, wait_for_all
from expertcast.data.early import EarlyAttention
from expertcast.data.early_trial import try_early
from expertcast.data.experts import Offload, experts_of, model_of
from expertcast.data.kept_outputs import KeptOutputs
from expertcast.data.means import MeanOutputs
from expertcast.data.plan import SPLITS, Plan, PlannedDocument, TextOptions, Window, make_plan
from expertcast.data.skeleton import check_code, save_skeleton
from expertcast.data.stand_in_file import read_stand_in, write_stand_in
from expertcast.data.stand_in_plan import kept_bytes, plan_stand_in
from expertcast.data.stream import ActivationStream
from expertcast.data.text import Document
from expertcast.data.trace_file import TraceInfo, read_info, write_info
from expertcast.data.traces import TraceDataset
from expertcast.data.window_batch import pad_windows
from expertcast.data.writer import REMEDY, SHARD_BYTES, ShardWriter, merged_progress, write_atomically
from expertcast.predictors.artefacts import digest, file_digest
from expertcast.predictors.errors import ExpertcastError
from expertcast.predictors.plain import Json, size_text


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
    means = MeanOutputs(view)
    plan = make_plan(documents, tokenizer, options, **fields)
    plan = plan.in_batches(_begun_with(folder) or experts.windows(plan.options.window))
    early, seen = try_early(model, view, plan)
    columns = layout.Columns(view.shape, layout.stored_logits_dtype(seen.logits_TLE.dtype), early is not None)
    windows = plan.windows_of(plan.documents)
    stream = ActivationStream(model, view, windows, batch_size=plan.options.batch_size)
    kept = KeptOutputs(folder / layout.PROGRESS_FOLDER)
    new = _new_info(stream, plan, share, columns, early)
    if share.rank == 0:
        _claim(folder, new)
        free = _check_disk(folder, plan, columns.row_bytes)
        if columns.early and not (folder / layout.STAND_IN_FILE).exists():
            keeps, start = share.world == 1 and kept_bytes(model, view, plan) < free, time.perf_counter()
            write_stand_in(folder, plan_stand_in(model, view, plan, kept if keeps else None))
            write_info(folder, {**new, "collection_s": time.perf_counter() - start})
    wait_for_all(share)
    info = read_info(folder)
    if info is None:
        raise ExpertcastError(f"rank {share.rank} does not see {folder}: ranks need a file system that they share")
    _check_settings(folder, info, new)
    if not info["complete"]:
        writer = ShardWriter(folder, means, rank=share.rank, columns=columns, shard_bytes=shard_bytes)
        if columns.early:
            stand_in = read_stand_in(folder, view.shape, plan.options.early_rank or 0)
            stream = ActivationStream(
                model, view, windows, batch_size=plan.options.batch_size, stand_in=stand_in, early=early
            )
        _run(stream, plan, share, writer, kept)
        wait_for_all(share)
        if share.rank == 0:
            _finish(folder, dict(info), stream, plan, columns, share)
        wait_for_all(share)
    return TraceDataset.open(folder)


def _run(stream: ActivationStream, plan: Plan, share: Share, writer: ShardWriter, kept: KeptOutputs) -> None:
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
    batches = islice(enumerate(_batches(plan, own, stream.batch_size)), writer.done.batches, None)
    with tqdm(total=total, initial=writer.done.rows, unit="token", desc=label, unit_scale=True) as bar:
        for number, (split, windows) in batches:
            batch = pad_windows(windows)
            stream.means = writer.means if split == "train" else None  # nothing a predictor knows is from held-out text
            with kept.reading(number, batch) as outputs:
                writer.add(stream.run(batch, outputs), batch.token_T)
            bar.update(len(batch))
    writer.commit()


def _batches(plan: Plan, own: list[PlannedDocument], batch_size: int) -> Iterator[tuple[str, list[Window]]]:
    """(split, windows) per forward; a batch never mixes splits."""
    for split in SPLITS:
        windows = plan.windows_of(own, split)
        for begin in range(0, len(windows), batch_size):
            yield split, windows[begin : begin + batch_size]


def _new_info(
    stream: ActivationStream, plan: Plan, share: Share, columns: layout.Columns, early: EarlyAttention | None
) -> Json:
    """trace.json of a collection that begins; its settings must be the same for the collection to be gone on with."""
    account = plan.account(stream.view)
    settings = {
        "fingerprint": account["fingerprint"],
        "dtype": str(stream.model.dtype).removeprefix("torch."),
        "window": account["window"],
        "tokens": account["tokens"],
        "batch_size": stream.batch_size,
        "ranks": share.world,
        "text": plan.digest,
    }
    if early is not None:
        not_early = [layer for layer in sorted(early.refused) if layer]
        settings |= {"early_rank": plan.options.early_rank, "not_early": not_early}
    identity = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    return {
        "format": layout.FORMAT,
        "id": identity[:16],
        "complete": False,
        "settings": settings,
        "columns": columns.note(),
        **account,
    }


def _begun_with(folder: Path) -> int | None:
    """Windows per forward of a collection that was begun in the folder, if there is one."""
    begun = read_info(folder) if folder.is_dir() else None
    return None if begun is None else int(begun["settings"]["batch_size"])


def _claim(folder: Path, new: Json) -> None:
    """Make the folder ours, or see that it is ours and was begun with these settings."""
    if folder.exists() and not folder.is_dir():
        raise ExpertcastError(f"{folder} is a file: give a folder for the traces")
    begun = read_info(folder)
    if begun is None:
        if folder.exists() and any(path.name != layout.TRACE_FILE + layout.PARTIAL for path in folder.iterdir()):
            raise ExpertcastError(f"{folder} is not empty and holds no traces of ours: give a new or an empty folder")
        folder.mkdir(parents=True, exist_ok=True)
        write_info(folder, new)
    else:
        _check_settings(folder, begun, new)


def _check_settings(folder: Path, begun: TraceInfo, new: Json) -> None:
    """
    Raises:
        ExpertcastError: the collection was begun with other settings than the `new` ones.
    """
    settings: Json = {**begun["settings"]}
    for key in (*new["settings"], *settings):
        before, value = settings.get(key), new["settings"].get(key)
        if before != value:
            raise ExpertcastError(
                f"{folder} was begun with {key}={before}, now it is {value}: give the settings it was begun with, or "
                "another folder"
            )


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


def _finish(
    folder: Path, info: Json, stream: ActivationStream, plan: Plan, columns: layout.Columns, share: Share
) -> None:
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
    if done.rows != plan.token_count():
        raise ExpertcastError(f"{folder}: {done.rows} rows are written of {plan.token_count()} tokens; {REMEDY}")
    defaults = means[0].default_vectors(experts_of(stream.model, view))
    vectors = save(defaults.as_tensors())
    write_atomically(folder / layout.DEFAULTS_FILE, vectors)
    save_skeleton(view, stream.model, folder / layout.SKELETON_FOLDER)
    layout.write_dataset_files(folder, columns, list(done.shards), info["id"])
    small = [folder / layout.DATASET_STATE_FILE, folder / layout.DATASET_INFO_FILE]
    small += sorted((folder / layout.SKELETON_FOLDER).iterdir())
    files = {path.relative_to(folder).as_posix(): file_digest(path) for path in small}
    files |= {layout.DEFAULTS_FILE: digest(vectors), **done.shards}
    if columns.early:
        files[layout.STAND_IN_FILE] = file_digest(folder / layout.STAND_IN_FILE)
    note = {"split": "train", "tokens": defaults.token_count}
    took = info.get("collection_s", 0.0) + done.seconds
    write_info(folder, {**info, "collection_s": took, "default_vectors": note, "files": files, "complete": True})
    shutil.rmtree(folder / layout.PROGRESS_FOLDER)
