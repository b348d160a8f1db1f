"""Tables of a result, in Markdown: every number on them comes from the file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from marked_page import replace_between

from draft_sides.claims import claims
from draft_sides.sides import AUTO, INT4, NONE
from expertcast.predictors.messages import Json

BEGIN, END = "<!-- tables -->", "<!-- end of tables -->"
_HEAD = ("side", "ms per token", "range", "x best exact, same memory", "tokens per cycle", "accepted 1st, 2nd, ...",
         "exact sets (hard + soft)", "coverage", "kB per token", "memory MB", "identical", "distinct")  # fmt: skip
_SHOWN = 4
FAIR = 1.03


def write(result: Json, page: Path) -> None:
    """Replace what stands between the page's marks.

    Raises:
        ExpertcastError: no such page, or no marks in it.
    """
    replace_between(page, BEGIN, END, tables(result), "tables are")


def tables(result: Json) -> str:
    """Targets, then a table for each setting."""
    lines = ["## Targets", "", *targets(result["results"])]
    lines += [*claims(result), *_same_inputs(result)]
    for setting in dict.fromkeys(row["setting"] for row in result["results"]):
        rows = [row for row in result["results"] if row["setting"] == setting]
        lines += ["", f"## {setting}, copy over compute {rows[0]['copy_over_compute']:.2g}", "", *_table(rows)]
        lines += _governors(rows)
    if result["left_out"]:
        lines += ["", "Left out, for lack of time:", "", *(f"- {line}" for line in result["left_out"])]
    return "\n".join(lines)


def targets(rows: Sequence[Json]) -> list[str]:
    """What was aimed at, and what came out, setting by setting."""
    lines = []
    for setting in dict.fromkeys(row["setting"] for row in rows):
        own = [row for row in rows if row["setting"] == setting and row["ablation"] is None]
        exact = best_exact(own)
        drafted = [row for row in own if row["draft"] == INT4]
        plain = [row for row in own if row["draft"] == NONE and not row["same_memory"]]
        auto = [row for row in own if row["draft"] == AUTO]
        if exact and drafted:
            fastest = min(drafted, key=lambda row: row["tpot_s"])
            lines.append(
                f"- {setting}: int4, {fastest['length']}, is {exact['tpot_s'] / fastest['tpot_s']:.2f} times the best "
                f"exact side in the same memory ({_exact_name(exact)})"
            )
        if auto and plain:
            others = [row for row in own if row["draft"] != AUTO and not row["same_memory"] and not row["forecasts"]]
            best, unled = min(others, key=lambda row: row["tpot_s"]), plain[0]
            lost = auto[0]["tpot_s"] / best["tpot_s"]
            lines.append(
                f"- {setting}: auto takes {lost:.3f} of the time of the best side without forecasts ({best['side']}): "
                f"**{'yes' if lost <= FAIR else 'no'}**; {auto[0]['tpot_s'] / unled['tpot_s']:.3f} of that of none"
            )
    return lines


def best_exact(rows: Sequence[Json]) -> Json | None:
    """The fastest exact side that has the bytes of int4 copies as slots."""
    found = [row for row in rows if row["draft"] == NONE and row["same_memory"]]
    return min(found, key=lambda row: row["tpot_s"], default=None)


def _exact_name(row: Json) -> str:
    return f"{row['forecasts'] or 'on demand'}, {row['slots']} slots"


def _table(rows: Sequence[Json]) -> list[str]:
    exact = best_exact(rows)
    lines = ["| " + " | ".join(_HEAD) + " |", "|" + "---|" * len(_HEAD)]
    for row in rows:
        least, most = row["range_s"]
        sets = row["exact_set"]
        accepted = " ".join(f"{share:.2f}" for share in row["acceptance"][:_SHOWN])
        cells = [
            row["side"], f"{row['ms_per_token']:.1f}", f"{1e3 * least:.1f}-{1e3 * most:.1f}",
            f"{exact['tpot_s'] / row['tpot_s']:.2f}" if exact else "", f"{row['tokens_per_cycle']:.2f}", accepted,
            f"{sets['hard'] + sets['soft']:.3f} ({sets['hard']:.3f} + {sets['soft']:.3f})" if sets else "",
            "" if row["coverage"] is None else f"{row['coverage']:.3f}", f"{row['kb_per_token']:.0f}",
            f"{row['memory_bytes'] / 1e6:.1f}", "yes" if row["identical"] else "no", f"{row['distinct']:.2f}",
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _same_inputs(result: Json) -> list[str]:
    """How copies route on the same text from its beginning, where the tables tell of running drafts."""
    head = ("copies", "hard", "soft", "exact", "mismatch", "recall", "same next token")
    lines = ["", "## Routing of the same inputs", "", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for name, found in result.get("exact_sets", {}).items():
        shares = (f"{found[key]:.3f}" for key in ("hard", "soft", "exact", "mismatch", "recall", "next_token"))
        lines.append("| " + " | ".join([name, *shares]) + " |")
    return lines if "exact_sets" in result else []


def _governors(rows: Sequence[Json]) -> list[str]:
    lines = []
    for row in rows:
        said = row.get("governor")
        if said and said["predicted_over_actual"] is not None:
            lengths = sorted(said["lengths"].items(), key=lambda own: -own[1])[:6]
            lines.append(
                f"- {row['side']}: predicted over actual cycle time {said['predicted_over_actual']:.3f} in the median, "
                f"{said['within_tenth']:.0%} of cycles to 10%; run most: "
                + ", ".join(f"{name} ({count})" for name, count in lengths)
            )
        found = row.get("replay")
        if found and found["cycles"]:
            lines.append(
                f"- {row['side']}: of {found['cycles']} cycles {found['agree']:.0%} have the length that is best in "
                f"hindsight, {found['as_good']:.0%} one that is as good; {found['rate_share']:.3f} of its tokens per "
                "second"
            )
    return ["", *lines] if lines else []
