"""The results of a run as a Markdown table, with the machine and the commit that they are of."""

import torch

from linpix.model import ops, provenance
from tests.soak.loads import Plan, Result
from tools.harness.machine import machine

HEADINGS = (
    "load",
    "requests",
    "images/s",
    "good/s",
    "queue, s",
    "first row, s",
    "whole, s",
    "memory",
    "",
)


def line(result: Result) -> str:
    """One result in words."""
    outcomes = ", ".join(
        f"{count:,} {outcome}" for outcome, count in sorted(result.outcomes.items())
    )
    state = (
        "FAILED"
        if result.failures
        else "MISSED"
        if result.missed
        else "NOT RUN"
        if result.skipped
        else "passed"
    )
    told = [outcomes, *result.notes, *result.missed, *result.failures]
    return "; ".join([f"{result.name}: {state}", *filter(None, told)])


def table(results: list[Result], plan: Plan, seconds: float) -> str:
    rows = [HEADINGS, ("---",) * len(HEADINGS), *(row(result) for result in results)]
    said = [line(result) for result in results if result.notes or result.missed or result.failures]
    return "\n".join(
        [
            (
                f"{plan.model.name} ({plan.batching.name} with random weights where a line says"
                f" so), {plan.seconds:.0f} s a load, {seconds / 60:.0f} minutes in all, clients and"
                f" service on {machine()}; torch {torch.__version__}, kernels"
                f" {ops.kernel() if ops.compiled else 'eager'}, commit {provenance.commit()}."
            ),
            "",
            *("| " + " | ".join(cells) + " |" for cells in rows),
            "",
            (
                "Times are p50 / p95 / p99: whole requests as clients saw them, queue and first"
                f" row from the service's histograms. good/s: answers within {plan.slo_s:g} s."
                " memory: resident, over that of the warm process."
            ),
            "",
            *(f"- {text}" for text in said),
            "",
        ]
    )


def row(result: Result) -> tuple[str, ...]:
    return (
        result.name,
        ", ".join(
            f"{count:,}{'' if outcome == 'completed' else f' {outcome}'}"
            for outcome, count in sorted(result.outcomes.items())
        ),
        number(result.rate),
        number(result.goodput),
        *(
            " / ".join(
                f"{value:.0f}" if value >= 100 else f"{value:.2g}"
                for value in result.spans.get(name, [])
            )
            for name in ("queue", "first row", "whole")
        ),
        "" if result.growth is None else f"{result.growth:.2f}",
        (
            "failed"
            if result.failures
            else "missed"
            if result.missed
            else "not run"
            if result.skipped
            else "passed"
        ),
    )


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
