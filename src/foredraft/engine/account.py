"""Where the time of a step is written down: in the records of its requests and of the engine."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from foredraft.engine.decide import Emission, step_stats
from foredraft.engine.protocols import StepTimes
from foredraft.engine.scheduler import Planned
from foredraft.types import Draft, SpecStats, Verdict


def account(
    total: SpecStats,
    plan: Seq[Planned],
    drafts: Seq[Draft],
    verdicts: Seq[Verdict],
    emissions: Seq[Emission],
    times: StepTimes,
    now: float,
) -> None:
    """Add one step to the record of each request in the plan, and to that of all, whose total_s are the
    seconds of steps. now: of the engine's clock.
    """
    decided = iter(zip(drafts, verdicts, emissions, strict=True))
    for planned in plan:
        seq, record = planned.seq, SpecStats()
        emission = Emission([], "", None)
        if planned.emits:
            draft, verdict, emission = next(decided)
            record = step_stats(draft, verdict, emission)
        if seq.stats.emitted == 0:
            record.prompt_s = (times.draft_s + times.target_s + times.other_s) / len(plan)
            record.ttft_s = now - seq.arrived_s if emission.token_ids else 0.0
        else:
            record.draft_s = times.draft_s / len(plan)
            record.target_s = times.target_s / len(plan)
            record.other_s = times.other_s / len(plan)
        seq.stats.add(record)
        seq.stats.total_s = now - seq.arrived_s
        total.add(record)
    total.total_s += times.draft_s + times.target_s + times.other_s
