"""The certificate: what is guaranteed to a user, by what, under which assumptions. A value to read, check and keep."""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass
from decimal import ROUND_CEILING, Context
from typing import Any

from shufflerl import html

#: What an assumption means for those who must see to it.
ASSUMPTIONS = {
    "unique users": "A person is one user, and takes part in as many batches of the run as the certificate says, and "
    "no more. Over several runs budgets add up.",
    "honest shuffler": "The shuffler hands over each batch whole and permuted: it picks no reports, makes none up, and "
    "does not collude with the coordinator. Where it does, all that remains may be each user's own noise, one part in "
    "n of a batch of n users.",
    "adding shuffler": "The shuffler hands over one sum of each batch and leaves out no more reports than announced: "
    "it picks none, makes none up, and does not collude with the coordinator. Where it does, all that remains may be "
    "each user's own noise.",
    "honest enrolment": "Whoever issues tokens enrols true users only. False ones need add no noise, and whoever can "
    "also delay true ones can leave one of them alone in a batch of any size.",
    "honest users": "At least this fraction of the users of each batch add the noise they were told to and keep it to "
    "themselves: {fraction:g}. The more is left out or told, the weaker the guarantee for all.",
    "sound cryptography": "Against the shuffler and the network the guarantee is computational: what they see is "
    "sealed (HPKE with X25519 and AES-128-GCM; where vectors are summed, masks of AES-128-CTR), and what they record "
    "is safe as long as that is not broken. Against a coordinator that sees releases alone no such assumption is "
    "needed.",
    "separate servers": "Shuffler and coordinator do not collude: each keeps its noise to itself and adds all of it "
    "to every batch, and the shuffler hands over tags permuted, or the sum of a batch alone, so that nothing leads to "
    "a sender. What a shuffler adds no noise to, the coordinator reads in clear; which reports it picks or makes up "
    "does not matter.",
    "one report": "A user reports one family and step. Simulated batches of several users draw these independently "
    "for each step, which changes how steps are correlated, not the law of any counter.",
    "trusted server": "One server sees every trajectory in clear and adds the noise itself. Its operator, and whoever "
    "breaks in, learn everything.",
    "exact noise": "Noise has exactly the stated law. Simulations draw it from a seeded generator and protect nobody; "
    "devices draw it from the operating system's random source, which is taken to be perfect. Gaussian noise is "
    "rounded to a fine lattice, so that its last bits tell nothing.",
    "public parameters": "Who takes part and when, the problem's shape, its known support, batch sizes, deployed "
    "policies and which counters are asked are public; only what users did is protected.",
}

#: How the model of trust translates into the models used by others.
IMPLICATIONS = {
    "shuffle": "Shuffle privacy of the releases implies joint differential privacy (billboard lemma): the policies "
    "that all others are given, and so what happens to them, follow from the releases. Where users add the noise, "
    "those who pool what they added count as users who add none.",
    "central": "Central privacy of the releases implies joint differential privacy (billboard lemma).",
    "local": "Local privacy holds against everyone but the user itself, the shuffler and server included; it implies "
    "shuffle and joint differential privacy.",
}

#: Online, users are not fixed episodes: what one did changes which policies later users are given. Up to the replaced
#: user's batch both runs have the same law, and what follows is post-processing of its release.
NEIGHBOURS = (
    "A user is a function, possibly random, from the policies it is given to its episodes. Two runs are neighbours if "
    "one user's function is replaced by any other. Later policies may then differ, and with them the episodes of later "
    "users; their functions do not."
)


def at_most(bound: float, digits: int = 4) -> str:
    """An upper bound as text in so many digits, rounded up: what is printed is a bound too.

    >>> at_most(0.99851), at_most(1.0)
    ('0.9986', '1')
    """
    return f"{float(Context(prec=digits, rounding=ROUND_CEILING).create_decimal(repr(float(bound)))):.{digits}g}"


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
    against: str
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
            "implies": self._implied,
        }

    def _meaning(self, assumption: str) -> str:
        return ASSUMPTIONS[assumption].format(fraction=self.honest_fraction)

    def _repr_html_(self) -> str:
        rows = {
            "guarantee": f"({at_most(self.epsilon)}, {at_most(self.delta, 6)})-differential privacy",
            "model": self.model,
            "budget": "none" if self.budget_epsilon is None else f"epsilon {self.budget_epsilon:g}",
            "mechanism": self.mechanism,
            "noise": f"standard deviation {self.noise_sd:,.4g} {self.noise_on}",
            "sensitivity": f"a replaced user changes at most {self.changed_counters} counters by one",
            "takes part": f"{self.participations} time{'s' * (self.participations > 1)}",
        }
        assumptions = html.folded("Assumptions", {name: self._meaning(name) for name in self.assumptions})
        follows = html.folded("What is compared, and what follows", {"Neighbours": NEIGHBOURS, "So": self._implied})
        return html.table("Certificate", rows, follows + assumptions)

    @property
    def _implied(self) -> str:
        return IMPLICATIONS[self.model]

    def __str__(self) -> str:
        lines = [
            f"({at_most(self.epsilon)}, {at_most(self.delta, 6)})-differential privacy in the {self.model} model",
            "",
            *([] if self.budget_epsilon is None else [f"  budget       epsilon {self.budget_epsilon:g}"]),
            f"  mechanism    {self.mechanism}",
            f"  noise        standard deviation {self.noise_sd:,.4g} {self.noise_on}",
            f"  sensitivity  a replaced user changes at most {self.changed_counters} counters by one",
            f"  takes part   {self.participations} time{'s' * (self.participations > 1)}",
            "",
            *_paragraph("What is compared", NEIGHBOURS),
            *_paragraph("Against whom", self.against),
            *_paragraph("What follows", self._implied),
            "Assumptions",
            *(line for name in self.assumptions for line in _bullet(name, self._meaning(name))),
        ]
        return "\n".join(lines)


def _paragraph(title: str, text: str) -> list[str]:
    return [title, *textwrap.wrap(text, 100, initial_indent="  ", subsequent_indent="  "), ""]


def _bullet(name: str, text: str) -> list[str]:
    return textwrap.wrap(f"{name}: {text}", 100, initial_indent="  - ", subsequent_indent="    ")
