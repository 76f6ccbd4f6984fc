"""Is the output unchanged? Greedy, sampled and parameter by parameter, on one certificate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from foredraft.measure.greedy import NOISE_FLOOR, GreedyFinding, check_greedy
from foredraft.measure.parameters import ParameterFinding, check_parameters
from foredraft.measure.sampled import SampledFinding, check_sampled, choose
from foredraft.measure.subjects import Subject

_DIFFERS = ("difference", "ignored")


@dataclass(frozen=True, slots=True)
class Plan:
    """How thorough a check is. answers: sampled ones, a side and a prompt. alpha: the chance of a false alarm
    of the sampled test as a whole.
    """

    greedy: int = 12
    sampled: int = 2
    answers: int = 400
    parameters: int = 2
    alpha: float = 1e-4


@dataclass(frozen=True, slots=True)
class Certificate:
    """What was tested and what was found. float32: greedy findings again, of requests that were ties."""

    baseline: str
    variant: str
    greedy: tuple[GreedyFinding, ...]
    sampled: SampledFinding | None
    parameters: tuple[ParameterFinding, ...]
    float32: tuple[GreedyFinding, ...] = ()

    @property
    def passed(self) -> bool:
        """True if nothing differs: ties are not differences, and an honest refusal is not either. What was
        not answered shows nothing, so then it is not passed.
        """
        return not self.differs and not self._failed

    @property
    def differs(self) -> bool:
        """True if something was seen to differ."""
        return (
            any(finding.judged == "difference" for finding in (*self.greedy, *self.float32))
            or (self.sampled is not None and self.sampled.differs)
            or any(finding.outcome in _DIFFERS for finding in self.parameters)
        )

    @property
    def _failed(self) -> bool:
        return (
            any(finding.judged == "failed" for finding in (*self.greedy, *self.float32))
            or (self.sampled is not None and bool(self.sampled.refused))
            or any(finding.outcome == "failed" for finding in self.parameters)
        )

    def record(self) -> dict[str, Any]:
        """Return it as plain JSON values."""
        return {"passed": self.passed, **asdict(self)}

    def lines(self) -> list[str]:
        """Return it as text, a line a finding."""
        kinds = [finding.judged for finding in self.greedy]
        counts = ", ".join(f"{kinds.count(k)} {k}" for k in ("same", "tie", "difference"))
        counts += f", {kinds.count('failed')} FAILED" if "failed" in kinds else ""
        said = "IT DIFFERS" if self.differs else "nothing differs" if self.passed else "NOT SHOWN, it failed"
        lines = [
            f"{self.variant} against {self.baseline}: {said}",
            f"greedy: {len(kinds)} comparisons, {counts}",
        ]
        lines += [_greedy_line(finding) for finding in self.greedy if finding.judged != "same"]
        lines += [f"in float32:{_greedy_line(finding)}" for finding in self.float32]
        if self.sampled is not None:
            lines += self.sampled.lines()
        lines += [
            f"{f.parameter}: {f.outcome}" + (f" ({f.detail})" if f.detail else "") for f in self.parameters
        ]
        return lines


def _greedy_line(finding: GreedyFinding) -> str:
    if finding.at is None:
        return f"  {finding.where}: {finding.judged} {finding.variant}".rstrip()
    gap = f"{finding.gap:.3g} nats apart" if finding.gap is not None else "with unknown gap"
    return f"  {finding.where}: {finding.judged} at token {finding.at}, {gap}, noise {finding.noise:.2g}"


def run_check(
    baseline: Subject,
    variant: Subject,
    bodies: Sequence[tuple[str, Mapping[str, Any]]],
    plan: Plan,
    on_part: Callable[[str], None] = lambda part: None,
) -> Certificate:
    """Check a variant against the same engine without drafting. bodies: (where, OpenAI body)."""
    on_part("greedy answers")
    greedy = check_greedy(baseline, variant, bodies[: plan.greedy])
    noise = next((finding.noise for finding in greedy if finding.noise is not None), NOISE_FLOOR)
    on_part("parameters, one by one")
    plain = [body for _, body in bodies]
    parameters = check_parameters(baseline, variant, plain[: plan.parameters], noise)
    sampled = None
    if plan.sampled and plan.answers:
        chosen = choose(baseline, variant, plain, plan.sampled)
        sampled = check_sampled(baseline, variant, chosen, plan.answers, plan.alpha, on_part)
    return Certificate(baseline.name, variant.name, tuple(greedy), sampled, tuple(parameters))
