"""Tables of a checkpoint's card as rows of cells, from config.json and metrics.json; empty ones are headings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from expertcast.predictors.plain import Json

RECALL = "recall_at_k"


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of equally many cells, the heading first; nothing where there is no more than a heading."""
    if len(rows) < 2:
        return ""
    lines = [" | ".join(cell.replace("|", "\\|") for cell in row) for row in rows]
    lines.insert(1, " | ".join(["---", *["---:"] * (len(rows[0]) - 1)]))
    return "\n".join(f"| {line} |" for line in lines)


def is_mean(metric: str, values: object, name: str) -> bool:
    shown = metric == RECALL or metric == "exact_set" or metric.startswith("timely@")
    own = values.get(name) if shown and isinstance(values, dict) and not metric.endswith("_chained") else None
    return isinstance(own, dict) and isinstance(own.get("mean"), float)


def scored(metrics: Json) -> str:
    """What the table of recall is of."""
    size = f"{metrics['tokens']:,} tokens" if "tokens" in metrics else "tokens"
    by = "target layer" if RECALL in metrics else "distance"
    return (
        f"Share of a token's experts that are among as many forecast ones (recall@k), on {size} of documents that\n"
        f"nothing was learned or chosen from, by {by}, beside forecasts that need no training."
    )


def layer_rows(name: str, metrics: Json) -> list[list[str]]:
    """A row per target layer and their mean, a column per predictor: this one first, chance last."""
    scores: dict[str, Json] = {**metrics.get(RECALL, {}), **metrics.get("baselines", {})}
    if name not in scores:
        return []
    scores = {name: scores.pop(name), **scores}
    layers = len(scores[name]["per_layer"])
    chance = metrics.get("chance", {}).get(RECALL)
    if chance is not None:
        scores["chance"] = {"mean": chance, "per_layer": [chance] * layers}
    targets = metrics.get("targets", range(1, layers + 1))
    rows = [["layer", *scores], ["mean", *(_decimal(each["mean"]) for each in scores.values())]]
    for index, layer in enumerate(targets):
        rows.append([str(layer), *(_decimal(each["per_layer"][index]) for each in scores.values())])
    return rows


def token_rows(metrics: Json) -> list[list[str]]:
    """A row per forecast, a column per token ahead."""
    found: Mapping[str, Json] = metrics.get("tokens_ahead", {})
    means = {name: values[RECALL]["mean"] for name, values in found.items()}
    steps = max(map(len, means.values()), default=0)
    heading = ["tokens ahead", *(str(step + 1) for step in range(steps))]
    return [heading, *([name, *map(_decimal, values)] for name, values in means.items())]


def other_rows(name: str, metrics: Json) -> list[list[str]]:
    """Timely recall and calibration."""
    rows = [["on the same tokens", name]]
    for metric, values in metrics.items():
        if metric.startswith("timely@") and is_mean(metric, values, name):
            link = metric.removeprefix("timely@R")
            rows.append(
                [f"recall of what is there in time, if K copies take {link} layers", _decimal(values[name]["mean"])]
            )
    error = metrics.get("calibration", {}).get(name, {})
    if "before" in error:
        rows.append(["calibration error, before it was calibrated", f"{error['before']['ece']:.4f}"])
        rows.append(["calibration error", f"{error['ece']:.4f}"])
    return rows


def training_rows(config: Json, metrics: Json) -> list[list[str]]:
    training, data = config.get("training", {}), metrics.get("data", {})
    given = {
        "command": f"`{config['command']}`",
        "tokens learned from": training.get("tokens"),
        "seconds": training.get("seconds") and f"{training['seconds']:.1f}",
        "seed": training.get("seed"),
        "processes": training.get("ranks"),
        "text": data.get("command") and f"`{data['command']}`",
        "SHA-256 of the text, as tokens": data.get("text") and f"`{data['text']}`",
        "documents": data.get("documents"),
        "tokens of train, validation, test": data.get("splits") and ", ".join(map(str, data["splits"].values())),
        "traces": metrics.get("traces") and f"`{metrics['traces']}`",
        "default vectors from": _elsewhere(training.get("default_vectors_from")),
        "expertcast, git revision": f"{config['expertcast_version']}, {config['git_revision']}",
        "versions": ", ".join(f"{name} {version}" for name, version in config["versions"].items()),
    }
    return [["trained", ""], *([key, str(value)] for key, value in given.items() if value is not None)]


def _elsewhere(note: object) -> str | None:
    """Where default vectors come from that are not of the traces."""
    return f"`{note.get('given')}`, digest `{note.get('digest')}`" if isinstance(note, dict) else None


def cost_rows(name: str, costs: Json) -> list[list[str]]:
    """The predictor's entry of the ledger."""
    written = {
        key: f"{value:,}" if isinstance(value, int) else f"{value:,.4g}" for key, value in costs.items() if value
    }
    return [["costs", name], *([key.replace("_", " "), value] for key, value in written.items())]


def model_rows(config: Json) -> list[list[str]]:
    shape = config["shape"]
    return [
        ["made for", ""],
        ["model", f"`{config['model_id']}`"],
        ["MoE layers, experts, experts per token, hidden size", ", ".join(str(shape[key]) for key in "LEKD")],
        ["reads", str(config["tap_point"])],
        ["fingerprint of routers and norms", f"`{config['fingerprint']}`"],
    ]


def _decimal(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
