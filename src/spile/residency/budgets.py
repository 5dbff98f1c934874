"""Turns a model and a probe of this machine into what each budget would give: a row a budget, from the least one that
works to everything mapped, and the budget from which more pays little.

It decides nothing: `plan.py` makes each row's plan, `forecast.py` its speed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from spile.architectures.spec import OwnModel
from spile.options import EngineOptions
from spile.residency.experts import ExpertTable
from spile.residency.forecast import USUAL_ROUTING, Forecast, Probe, Routing, forecast
from spile.residency.plan import MemoryNow, Plan, make_plan, mapped_budget, smallest_budget

ENOUGH_PART = 0.9  # of the best speed: from there on, more memory pays little
_STEPS = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)  # of a table's budgets, in each power of ten
_FINE_STEP = 1.05  # between budgets that are looked at for the one that is enough


@dataclass(frozen=True)
class Row:
    """What one budget gives; no forecast without a probe."""

    budget_nbytes: int
    plan: Plan
    hit_rate: float
    forecast: Forecast | None


@dataclass(frozen=True)
class Outlook:
    """All budgets. `enough` is the least within a tenth of the best speed that any budget has; None: unknown."""

    rows: tuple[Row, ...]
    smallest: Row
    mapped_nbytes: int | None  # from which on everything is mapped; None: a pool was asked for
    enough_warm_nbytes: int | None
    enough_cold_nbytes: int | None


def look_at_budgets(
    model: OwnModel,
    options: EngineOptions,
    memory: MemoryNow,
    probe: Probe | None,
    routing: Routing = USUAL_ROUTING,
) -> Outlook:
    """Plan and forecast every budget worth a row; what the user asked for besides the budget is kept. No disk access.

    Raises: as `make_plan`, but BudgetError.
    """
    table = ExpertTable(model)

    def row(budget: int) -> Row:
        made = make_plan(model, table, replace(options, memory_bytes=budget), memory)
        expected = None if probe is None else forecast(model, made, probe, routing)
        share = 1.0 if made.is_mapped else made.num_slots / max(1, model.spec.num_routed_experts)
        return Row(budget, made, routing.hit_rate(share) if share < 1 else 1.0, expected)

    mapped = mapped_budget(model, table, options, memory)
    least = mapped
    if options.io != "mapped":
        any_budget = replace(options, memory_bytes=options.memory_bytes or 1)  # which --flash-moe depends on
        least = smallest_budget(model, table, any_budget, memory)
    mapped = max(least, mapped)
    most = mapped
    if memory.limit_nbytes is not None:  # a control group allows no more
        most = min(mapped, memory.process_nbytes + memory.available_nbytes)
    asked = [budget for budget in [options.memory_bytes] if budget is not None and least <= budget <= mapped]
    others = [budget for budget in (mapped, *_round_budgets(least, mapped)) if budget <= most]
    budgets = sorted({least, *others, *asked})
    rows = tuple(row(budget) for budget in budgets)
    warm = cold = None
    if probe is not None:
        count = int(math.log(max(1.0, most / least)) / math.log(_FINE_STEP))
        fine = sorted({*budgets, *(int(least * _FINE_STEP**step) for step in range(1, count + 1))})
        tried = [row(budget) for budget in fine]
        made = [(one.budget_nbytes, one.forecast) for one in tried if one.forecast is not None]
        warm = _enough((budget, expected.decode_warm) for budget, expected in made)
        cold = _enough((budget, expected.decode_cold) for budget, expected in made)
    return Outlook(rows, rows[0], mapped if options.may_map else None, warm, cold)


def least_plan(
    model: OwnModel, table: ExpertTable, options: EngineOptions, memory: MemoryNow, num_slots: int
) -> Plan:
    """Return the plan of the least budget, to 1 MB, that has so many slots, or has everything mapped."""

    def plan(megabytes: int) -> Plan:
        return make_plan(model, table, replace(options, memory_bytes=megabytes * 1_000_000), memory)

    low = smallest_budget(model, table, options, memory) // 1_000_000
    high = max(low, mapped_budget(model, table, options, memory) // 1_000_000)
    while low < high:
        middle = (low + high) // 2
        made = plan(middle)
        low, high = (low, middle) if made.is_mapped or made.num_slots >= num_slots else (middle + 1, high)
    return plan(low)


def _round_budgets(least: int, most: int) -> list[int]:
    powers = range(int(math.log10(least)), int(math.log10(most)) + 1)
    numbers = (int(step * 10**power) for power in powers for step in _STEPS)
    return [number for number in numbers if 1.08 * least < number < most / 1.08]


def _enough(speeds: Iterable[tuple[int, float | None]]) -> int | None:
    known = [(budget, speed) for budget, speed in speeds if speed is not None]
    best = max((speed for _, speed in known), default=0.0)
    return next((budget for budget, speed in known if speed >= ENOUGH_PART * best), None)
