"""The certificate: what is guaranteed to a user, by what, under which assumptions. A value to read, check and keep."""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass
from typing import Any

#: What an assumption means for those who must see to it.
ASSUMPTIONS = {
    "unique users": "A user takes part in as many batches of the run as the certificate says, and no more.",
    "honest shuffler": "The shuffler permutes each batch and does not collude with the coordinator. If it does, what "
    "remains is each user's own noise, one part in n of a batch of n users.",
    "adding shuffler": "The shuffler hands over one sum of each batch, leaves out no more reports than announced, and "
    "does not collude with the coordinator. If it does, what remains is each user's own noise.",
    "honest users": "At least this fraction of the users of a batch add the noise they were told to: {fraction:g}. "
    "Dropped noise beyond that weakens the guarantee for all.",
    "one report": "A user reports one family and step. Simulated batches of several users draw these independently "
    "for each step, which changes how steps are correlated, not the law of any counter.",
    "trusted server": "One server sees every trajectory in clear and adds the noise itself. Its operator, and whoever "
    "breaks in, learn everything.",
    "exact noise": "Noise has exactly the stated law. Simulations draw it from a seeded generator and protect nobody; "
    "devices draw it from the operating system's random source. Gaussian noise is rounded to a fine lattice, so that "
    "its last bits tell nothing.",
    "public parameters": "The problem's shape, its known support, batch sizes, deployed policies and which counters "
    "are asked are public; only what users did is protected.",
}

#: How the model of trust translates into the models used by others.
IMPLICATIONS = {
    "shuffle": "Shuffle privacy implies joint differential privacy (billboard lemma): what anyone but the user itself "
    "sees, the policies deployed to all others included, is a function of the protected releases.",
    "central": "Central privacy of the releases implies joint differential privacy (billboard lemma).",
    "local": "Local privacy holds against everyone but the user itself, the shuffler and server included; it implies "
    "shuffle and joint differential privacy.",
}

NEIGHBOURS = "Two runs are neighbours if one user's whole trajectory is replaced by any other."


@dataclass(frozen=True)
class Certificate:
    """(epsilon, delta)-differential privacy for every user of a run.

    `epsilon` is what the mechanism truly costs, by the accountant, at `delta`; it is at most `budget_epsilon`, if one
    was set.
    """

    epsilon: float
    delta: float
    budget_epsilon: float | None
    model: str
    mechanism: str
    noise_sd: float
    noise_on: str
    changed_counters: int
    participations: int
    honest_fraction: float
    assumptions: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """The certificate as JSON values, with the meaning of every assumption written out."""
        return {
            **asdict(self),
            "neighbours": NEIGHBOURS,
            "assumptions": {name: self._meaning(name) for name in self.assumptions},
            "implies": IMPLICATIONS[self.model],
        }

    def _meaning(self, assumption: str) -> str:
        return ASSUMPTIONS[assumption].format(fraction=self.honest_fraction)

    def __str__(self) -> str:
        lines = [
            f"({self.epsilon:.4g}, {self.delta:g})-differential privacy in the {self.model} model",
            "",
            *([] if self.budget_epsilon is None else [f"  budget       epsilon {self.budget_epsilon:g}"]),
            f"  mechanism    {self.mechanism}",
            f"  noise        standard deviation {self.noise_sd:,.4g} {self.noise_on}",
            f"  sensitivity  a replaced user changes at most {self.changed_counters} counters by one",
            f"  takes part   {self.participations} time{'s' * (self.participations > 1)}",
            "",
            *_paragraph("What is compared", NEIGHBOURS),
            *_paragraph("What follows", IMPLICATIONS[self.model]),
            "Assumptions",
            *(line for name in self.assumptions for line in _bullet(name, self._meaning(name))),
        ]
        return "\n".join(lines)


def _paragraph(title: str, text: str) -> list[str]:
    return [title, *textwrap.wrap(text, 100, initial_indent="  ", subsequent_indent="  "), ""]


def _bullet(name: str, text: str) -> list[str]:
    return textwrap.wrap(f"{name}: {text}", 100, initial_indent="  - ", subsequent_indent="    ")
