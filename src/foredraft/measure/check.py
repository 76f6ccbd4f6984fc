"""Is the output unchanged? Greedy, sampled and parameter by parameter, on one certificate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from foredraft.measure.greedy import GreedyFinding, check_greedy
from foredraft.measure.laws import LawTest, detectable, looks, spent, tree_test
from foredraft.measure.parameters import ParameterFinding, check_parameters
from foredraft.measure.subjects import Answered, Subject

_POWER = 0.9
_SHORT = 6  # tokens of a sampled answer
_BATCH = 256  # answers asked for at once
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
class SampledFinding:
    """What the distribution test saw. differs: at the stated error rate. detectable: the shift of one token's
    probability that would have been found with the stated power.
    """

    differs: bool
    answers: int
    prompts: int
    looks: int
    statistic: float
    dof: int
    toward: float
    pvalue: float
    alpha: float
    power: float
    detectable: float
    refused: str = ""


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
            lines.append(_sampled_line(self.sampled))
        lines += [
            f"{f.parameter}: {f.outcome}" + (f" ({f.detail})" if f.detail else "") for f in self.parameters
        ]
        return lines


def _greedy_line(finding: GreedyFinding) -> str:
    if finding.at is None:
        return f"  {finding.where}: {finding.judged} {finding.variant}".rstrip()
    gap = f"{finding.gap:.3g} nats apart" if finding.gap is not None else "with unknown gap"
    return f"  {finding.where}: {finding.judged} at token {finding.at}, {gap}, noise {finding.noise:.2g}"


def _sampled_line(found: SampledFinding) -> str:
    if found.refused:
        return f"sampled: refused, {found.refused}"
    what = "the distributions DIFFER" if found.differs else "no difference"
    return (
        f"sampled: {what}, p = {found.pvalue:.2g} after {found.answers} answers a side and prompt "
        f"({found.prompts} prompts, look {found.looks}); a false alarm has chance {found.alpha:g}, a shift "
        f"of {found.detectable:.3f} in one token's probability would be found with chance {found.power:g}"
    )


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
    noise = next((finding.noise for finding in greedy if finding.noise is not None), 1e-5)
    on_part("parameters, one by one")
    plain = [body for _, body in bodies]
    parameters = check_parameters(baseline, variant, plain[: plan.parameters], noise)
    sampled = None
    if plan.sampled and plan.answers:
        sampled = check_sampled(baseline, variant, plain[: plan.sampled], plan, on_part)
    return Certificate(baseline.name, variant.name, tuple(greedy), sampled, tuple(parameters))


def check_sampled(
    baseline: Subject,
    variant: Subject,
    bodies: Sequence[Mapping[str, Any]],
    plan: Plan,
    on_part: Callable[[str], None],
) -> SampledFinding:
    """Draw short answers from both and compare their laws, at looks that stop as soon as they differ."""
    sizes = looks(plan.answers)
    samples: list[tuple[list[Any], list[Any]]] = [([], []) for _ in bodies]
    found = LawTest(0.0, 0, 0.0, 1.0)
    refused = ""
    done, share = 0, 0.0
    for size, share in zip(sizes, spent(sizes, plan.alpha), strict=True):
        on_part(f"sampled answers, {size} of {sizes[-1]}")
        for body, pair in zip(bodies, samples, strict=True):
            refused = refused or _draw(baseline, body, pair[0], size, 0)
            refused = refused or _draw(
                variant, body, pair[1], size, 1
            )  # other seeds: the sides must not share
        found, done = tree_test(samples), done + 1
        if refused or found.pvalue < share:
            break
    count = len(samples[0][1])
    return SampledFinding(
        differs=found.pvalue < share,
        answers=count,
        prompts=len(bodies),
        looks=done,
        statistic=found.statistic,
        dof=found.dof,
        toward=found.toward,
        pvalue=found.pvalue,
        alpha=plan.alpha,
        power=_POWER,
        detectable=detectable(max(count, 1), plan.alpha, _POWER),
        refused=refused,
    )


def _draw(subject: Subject, body: Mapping[str, Any], into: list[Any], size: int, side: int) -> str:
    """Add answers up to `size`; return why not, if they are refused."""
    said = {name: body[name] for name in ("messages", "prompt") if name in body}
    temperature = float(body.get("temperature") or 0.0) or 1.0
    while len(into) < size:
        seeds = range(len(into), min(size, len(into) + _BATCH))
        asked = [
            {**said, "temperature": temperature, "max_tokens": _SHORT, "seed": 2 * seed + side, "logprobs": 0}
            for seed in seeds
        ]
        for answer in subject.ask(asked, together=True):
            if answer.refused:
                return answer.refused
            into.append(_units(answer))
    return ""


def _units(answer: Answered) -> tuple[Any, ...]:
    """An answer as tokens, or words where they are not told; its end counts as one."""
    units = answer.tokens if answer.tokens is not None else tuple(answer.text.split(" "))
    return (*units, None) if answer.finish == "stop" else tuple(units)
