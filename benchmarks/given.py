"""What a request was given, step by step."""

from __future__ import annotations

from dataclasses import dataclass, field

from foredraft.types import StepOutput


@dataclass(eq=False, kw_only=True)
class Given:
    """The outputs of a request so far."""

    outputs: list[StepOutput] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        """All emitted ids."""
        return [token for output in self.outputs for token in output.token_ids]

    @property
    def text(self) -> str:
        """All that was shown."""
        return "".join(output.text for output in self.outputs)

    @property
    def logprobs(self) -> list[float]:
        """Of the emitted tokens."""
        return [entry.logprob for output in self.outputs for entry in output.logprobs or ()]

    @property
    def end(self) -> str | None:
        """The finish reason."""
        return self.outputs[-1].finish_reason
