"""What a step tells the proposer."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from torch import Tensor

from foredraft.engine.batch import Batch
from foredraft.engine.decide import Emission
from foredraft.engine.protocols import ForwardOut
from foredraft.engine.scheduler import Planned
from foredraft.engine.sequence import Sequence
from foredraft.types import Verdict


def news(
    plan: Seq[Planned], verdicts: Seq[Verdict], emissions: Seq[Emission], batch: Batch, out: ForwardOut
) -> tuple[list[Sequence], list[Verdict], list[tuple[Tensor, ...]]]:
    """Return what a proposer may learn from a step, as Proposer.observe takes it.

    To one that reads hidden states a chunk of a prompt is a step too, whose next token is the prompt's own.
    """
    seqs: list[Sequence] = []
    judged: list[Verdict] = []
    hidden: list[tuple[Tensor, ...]] = []
    decided = iter(zip(verdicts, emissions, strict=True))
    for planned, span in zip(plan, batch.spans, strict=True):
        seq, kept = planned.seq, tuple[int, ...]()
        if planned.emits:
            verdict, emission = next(decided)
            kept = verdict.path[: len(emission.token_ids) - 1]
        elif out.hidden:
            verdict = Verdict((), seq.tokens[seq.kv_len], recovered=False)
        else:
            continue
        nodes = span.start + span.pending
        if kept == tuple(range(len(kept))):
            rows: slice | list[int] = slice(span.start, nodes + len(kept))
        else:
            rows = [*range(span.start, nodes), *(nodes + node for node in kept)]
        seqs.append(seq)
        judged.append(verdict)
        hidden.append(tuple(layer[rows] for layer in out.hidden))
    return seqs, judged, hidden
