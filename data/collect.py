"""`collect`: run a model over text once, and keep residuals, router logits and default vectors as traces."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import torch
from safetensors.torch import save
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from expertcast.data import trace_format as layout
from expertcast.data.batch import TraceBatch
from expertcast.data.capture import Capture, EarlyRun, attached
from expertcast.data.early import EarlyAttention, told
from expertcast.data.experts import WINDOWS, Offload, experts_of, model_of, run_windows
from expertcast.data.means import MeanOutputs
from expertcast.data.plan import (
    SPLITS,
    Plan,
    PlannedDocument,
    TextOptions,
    Window,
    WindowBatch,
    make_plan,
    pad_windows,
    window_batches,
)
from expertcast.data.processes import Share, documents_of, join_ranks, training_share, wait_for_all
from expertcast.data.skeleton import check_code, save_skeleton
from expertcast.data.stand_in import TOKENS, KeptOutputs, NoExperts, Outputs, first_windows, fit_stand_in
from expertcast.data.text import Document
from expertcast.data.trace_format import TraceInfo, read_info, write_atomically, write_info
from expertcast.data.trace_writer import (
    REMEDY,
    SHARD_BYTES,
    RankWriter,
    complete,
    merged_progress,
    read_stand_in,
    write_stand_in,
)
from expertcast.data.traces import TraceDataset
from expertcast.predictors.early_attention import StandIn
from expertcast.predictors.messages import ExpertcastError, Json, size_text
from expertcast.predictors.view import MoEView, RuleCheck


class ActivationStream:
    """Iterates TraceBatch over windows, in order, from a running model; nothing is stored.

    Args:
        model: is run, in eval mode; its own mode comes back afterwards. It may be offloaded.
        view: the model's MoE layers.
        windows: what iteration runs over, in order.
        batch_size: windows per forward; None: 8.
        means: where to add expert outputs, for default vectors; None leaves them out.
        stand_in: what early attention runs on; None leaves it out.
        early: runs it, where it has been tried before, and must go on at the layers that it runs at then; None makes it
            anew.
        residual_dtype: what residuals are rounded to; traces hold bf16.

    Raises:
        ExpertcastError: `batch_size` under 1, or a window longer than the model's context.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        view: MoEView,
        windows: Sequence[Window],
        *,
        batch_size: int | None = None,
        means: MeanOutputs | None = None,
        stand_in: StandIn | None = None,
        early: EarlyAttention | None = None,
        residual_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        batch_size = WINDOWS if batch_size is None else batch_size
        if batch_size < 1:
            raise ExpertcastError(f"batch_size={batch_size}: give at least 1 window per forward")
        limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        longest = max((len(window.token_ids) for window in windows), default=0)
        if limit is not None and longest > limit:
            raise ExpertcastError(f"window={longest} is longer than the model's context of {limit} tokens: shorten it")
        self.model, self.view, self.windows = model, view, windows
        self.batch_size, self.means, self.residual_dtype = batch_size, means, residual_dtype
        self._early: EarlyRun | None = None
        self._refused = None if early is None else dict(early.refused)
        if stand_in is not None:
            self._early = EarlyRun(early or EarlyAttention(model, view, whole=True), stand_in.to(model.device))
        self._check = RuleCheck(view)

    @property
    def early(self) -> EarlyAttention | None:
        """Runs early attention, where there is a stand-in for it."""
        return None if self._early is None else self._early.attention

    def __iter__(self) -> Iterator[TraceBatch]:
        for batch in window_batches(self.windows, self.batch_size):
            yield self.run(batch)

    @torch.no_grad()
    def run(self, batch: WindowBatch, outputs: Outputs | None = None) -> TraceBatch:
        """One forward. Rows are the batch's real tokens in order, on the CPU.

        Args:
            batch: is run.
            outputs: answers for routed experts where it can; None: they run.

        Raises:
            ExpertcastError: a router goes by more than the logits that are kept of it, or early attention stopped at a
                layer.
        """
        capture = Capture(
            self.view, batch.mask_BS, means=self.means, check=self._check, residual_dtype=self.residual_dtype,
            early=self._early, outputs=outputs,
        )  # fmt: skip
        with attached(self.model, self.view, capture):
            run_windows(self.model, batch)
        capture.finish()
        if self.early is not None and self._refused is not None and self.early.refused != self._refused:
            lines = told({layer: why for layer, why in self.early.refused.items() if layer not in self._refused})
            raise ExpertcastError(
                f"early attention stopped half-way at {'; '.join(lines)}: run the text anew without it "
                "(--early-rank none)"
            )
        if self.means is not None:
            self.means.token_count += len(batch)
        return TraceBatch(
            residual_TLD=capture.residual_TLD.cpu(),
            logits_TLE=capture.logits_TLE.cpu(),
            early_TLD=None if capture.early_TLD is None else capture.early_TLD.cpu(),
            document_T=batch.document_T,
            position_T=batch.position_T,
            token_T=batch.token_T,
        )


# Stand-in for early attention


def plan_stand_in(model: PreTrainedModel, view: MoEView, plan: Plan, keep: KeptOutputs | None = None) -> StandIn:
    """The stand-in of the rank that the plan asks for.

    Args:
        model: is run over a part of the train split, in the batches in which a collection by one process runs it.
        view: its MoE layers.
        plan: of the collection.
        keep: gets what the experts put out.
    """
    options = plan.options
    return fit_stand_in(
        model, view, _windows(plan), rank=options.early_rank or 0, batch_size=options.batch_size or WINDOWS,
        keep=keep,
    )  # fmt: skip


def kept_bytes(model: PreTrainedModel, view: MoEView, plan: Plan) -> int:
    """What is kept of the `plan`'s text, in bytes; `view` are the `model`'s layers."""
    windows = _windows(plan)
    batches = -(-len(windows) // (plan.options.batch_size or WINDOWS))
    return KeptOutputs.nbytes(view, sum(len(window.token_ids) for window in windows), batches, model.dtype.itemsize)


def _windows(plan: Plan) -> list[Window]:
    return first_windows(plan.windows_of(plan.documents, "train"), TOKENS)


# Trial of early attention on the first window


def try_early(model: PreTrainedModel, view: MoEView, plan: Plan) -> tuple[EarlyAttention | None, TraceBatch]:
    """What runs early attention over the plan's text, and the first window's tokens as a stream gives them.

    None where the plan leaves it out, or no layer of the `model`, whose layers `view` holds, can be run early. Which
    layers cannot, and why, is said on standard error.
    """
    stand_in = None if plan.options.early_rank is None else StandIn(view.shape, 0)
    stream = ActivationStream(model, view, [], stand_in=stand_in)
    early = stream.early
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "forecasts do without early attention")  # said here
        # what is tried is attention and routers: experts would be read from a disk for it
        seen = stream.run(pad_windows(plan.windows_of(plan.documents)[:1]), NoExperts())
    if early is None:
        return None, seen
    if training_share().rank == 0:
        lines = told(early.refused) if len(view) > 1 else ["a model of one MoE layer"]
        for line in lines:
            print(f"no early attention at {line}", file=sys.stderr)
    return early if early.works else None, seen


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
        writer = RankWriter(folder, means, rank=share.rank, columns=columns, shard_bytes=shard_bytes)
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
    batches = islice(enumerate(_batches(plan, own, stream.batch_size)), writer.done.batches, None)
    with tqdm(total=total, initial=writer.done.rows, unit="token", desc=label, unit_scale=True) as bar:
        for number, (split, windows) in batches:
            batch = pad_windows(windows)
            stream.means = writer.means if split == "train" else None  # nothing a predictor knows is from held-out text
            with kept.reading(number, batch) as outputs:
                writer.append(stream.run(batch, outputs))
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
        "early_rank": None if early is None else plan.options.early_rank,
        "not_early": [] if early is None else [layer for layer in sorted(early.refused) if layer],
    }
    identity = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    return {
        "format": layout.FORMAT,
        "id": identity[:16],
        "complete": False,
        "settings": settings,
        "columns": columns.note(),
        "files": {},
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
    for key, value in new["settings"].items():
        before = settings[key]
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
    write_atomically(folder / layout.DEFAULTS_FILE, save(defaults.as_tensors()))
    save_skeleton(view, json.loads(stream.model.config.to_json_string()), folder / layout.SKELETON_FOLDER)
    info["collection_s"] = info.get("collection_s", 0.0) + done.seconds
    complete(folder, info, plan.documents, columns, done.shards)
    shutil.rmtree(folder / layout.PROGRESS_FOLDER)
