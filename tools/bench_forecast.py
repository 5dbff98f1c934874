"""A model and a list of budgets -> what `spile plan` forecasts beside what a run measures, as a table and JSON.

    python tools/bench_forecast.py MODEL [--budgets 300MB,630MB,1GB,2GB,resident] [--modes cold,warm] [--rounds 1]
        [--trace FILE] [--throttle 550MB]

Runs are those of `bench_budgets.py`; a plan is made just before each, in the same control groups: cold with a budget,
both see the hard memory limit, and `--throttle` holds the disk of both to so many bytes a second. With several rounds
each figure is the median. A ratio above 1 means that the forecast was too high.

Prints one row a budget and mode; the last line is JSON, a list of objects with every round's figures.
"""

import argparse
import json
import statistics
from typing import Any

from bench_budgets import (
    Groups,
    argument_parser,
    measure,
    options_of,
    prepare,
    print_rows,
    prompt_of,
    run_inside,
)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--trace", help="of `spile bench trace`, for the plan")
    arguments = parser.parse_args()
    prompt = prompt_of(arguments.model, arguments.prompt_tokens)
    heading = (
        "budget",
        "mode",
        "hits",
        "decode forecast",
        "measured",
        "ratio",
        "prompt forecast",
        "measured",
        "ratio",
    )
    print("{:>9} {:>5} {:>11} {:>16} {:>9} {:>6} {:>16} {:>9} {:>6}".format(*heading))

    def row_of(budget: str, mode: str) -> dict[str, Any]:
        return _row(budget, mode, [_round(arguments, budget, mode, prompt) for _ in range(arguments.rounds)])

    print_rows(arguments, row_of, _line)


def _round(arguments: argparse.Namespace, budget: str, mode: str, prompt: str) -> dict[str, Any]:
    options = options_of(budget, mode)
    command = [arguments.python, "-m", "spile", "plan", arguments.model, "--json"]
    for name, value in options.items():
        command += ["--" + name.replace("_", "-"), str(value)]
    if arguments.trace:
        command += ["--trace", arguments.trace]
    prepare(arguments.model, mode)
    groups = Groups(arguments.model, options.get("memory") if mode == "cold" else None, arguments.throttle)
    done, _ = run_inside(command, "", groups)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    measured = measure(arguments, budget, mode, prompt)
    assert measured["exit"] == 0, measured["error"]
    expected = plan["forecast"]
    return {
        "hits_forecast": expected["hit_rate"],
        "hits_measured": measured["decode_hit_rate"],
        "decode_forecast": expected[f"decode_{mode}"],
        "decode_measured": measured["tokens_per_second"],
        "prefill_forecast": expected[f"prefill_{mode}"],
        "prefill_measured": measured["prompt_tokens_per_second"],
        "of_ceiling": measured.get("of_ceiling"),
        "charged_peak_bytes": measured["charged_peak_bytes"],
        "peak_memory_bytes": measured["peak_memory_bytes"],
        "probe": plan["probe"],
    }


def _row(budget: str, mode: str, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {"budget": budget, "mode": mode}
    for name in ("hits", "decode", "prefill"):
        for kind in ("forecast", "measured"):
            values = [one[f"{name}_{kind}"] for one in rounds]
            row[f"{name}_{kind}"] = None if None in values else statistics.median(values)
        forecast, measured = row[f"{name}_forecast"], row[f"{name}_measured"]
        row[f"{name}_ratio"] = forecast / measured if forecast and measured else None
    return row | {"rounds": rounds}


def _line(row: dict[str, Any]) -> str:
    text = f"{row['budget']:>9} {row['mode']:>5} {row['hits_forecast']:>5.0%} {row['hits_measured']:>5.0%}"
    for name in ("decode", "prefill"):
        forecast, measured, ratio = (row[f"{name}_{kind}"] for kind in ("forecast", "measured", "ratio"))
        values = ("-" if value is None else f"{value:.1f}" for value in (forecast, measured))
        text += "{:>17} {:>9}".format(*values) + f" {'-' if ratio is None else format(ratio, '.2f'):>6}"
    return text


if __name__ == "__main__":
    main()
