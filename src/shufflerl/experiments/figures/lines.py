"""Who is compared: one entry of `LINES` per learner and model of trust. To add a learner to the figures, add an entry.

Lines with constants to choose have the same number of candidates; which one is shown is chosen on tuning seeds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

DELTA = 1e-5
DELTA_TEXT = "10⁻⁵"


@dataclass(frozen=True, eq=False, kw_only=True)
class Line:
    """A learner with a privatizer under the name the paper has for the two.

    `candidates` are the constants to choose from, the learner's own defaults first; `theory` are those that come with
    a proof, None where there is none. `plans` among them is how many times it plans in all, whatever K is.
    """

    name: str
    learner: str
    privatizer: str
    candidates: tuple[dict[str, Any], ...] = ({},)
    theory: dict[str, Any] | None = None
    colour: str  # of Okabe and Ito: told apart by colour-blind readers too, and the dashes and markers differ as well
    dashes: str = "-"
    marker: str

    @property
    def private(self) -> bool:
        """Whether it has a privacy budget."""
        return self.privatizer != "none"

    def parameters(self, constants: dict[str, Any], episodes: int) -> dict[str, Any]:
        """What the learner is given for these constants: so many plans are batches of so many users."""
        batch = {"batch": -(-episodes // constants["plans"])} if "plans" in constants else {}
        return {name: value for name, value in constants.items() if name != "plans"} | batch


#: Standard errors of the radius, and how fast the stages grow.
_STAGES = tuple(
    {"deviations": deviations, "base": base}
    for deviations, base in ((3.3, 1.7), (2.0, 2.0), (3.3, 2.0), (5.0, 2.0), (2.0, 1.7), (5.0, 1.7))
)
#: What multiplies the bonus.
_SCALES = tuple({"scale": scale} for scale in (0.05, 0.01, 1.0, 0.2, 0.003, 5.0))
#: The same with few plans: continual counting has the less noise, the fewer sums it releases.
_PLANS = tuple(
    {"scale": scale, "plans": plans}
    for scale, plans in ((0.005, 100), (0.005, 500), (0.005, 30), (0.02, 100), (0.02, 500), (0.005, 2_000))
)

#: The paper's radius and stages; the product set holds at least the policies of the paper's and serves any size.
_PAPER = {"constants": "paper", "policies": "product"}
_UNSCALED = {"scale": 1.0}

# Nothing is chosen of `optimistic`: its defaults were tuned before, on RiverSwim among others.
OPTIMISTIC = Line(name="optimistic", learner="optimistic", privatizer="shuffle", colour="#CC79A7", marker="D")
OPTIMISTIC_FREE = replace(OPTIMISTIC, name="optimistic, no privacy", privatizer="none", dashes="--")
SDP_PE = Line(
    name="SDP-PE",
    learner="sdp-pe",
    privatizer="shuffle",
    candidates=_STAGES,
    theory=_PAPER,
    colour="#0072B2",
    marker="o",
)
PE = replace(SDP_PE, name="PE", privatizer="none", colour="#56B4E9", dashes="--")
UCBVI_JDP = Line(
    name="UCBVI-JDP",
    learner="ucbvi",
    privatizer="central",
    candidates=_SCALES,
    theory=_UNSCALED,
    colour="#009E73",
    marker="s",
)
UCBVI = replace(UCBVI_JDP, name="UCBVI", privatizer="none", colour="#E69F00", dashes="--")
UCBVI_RARELY = replace(
    UCBVI_JDP, name="UCBVI-JDP, planning rarely", candidates=_PLANS, theory=None, dashes=":", marker="v"
)
UCBVI_LDP = replace(UCBVI, name="UCBVI-LDP", privatizer="local", colour="#D55E00", dashes="-.", marker="^")

LINES = (OPTIMISTIC, SDP_PE, UCBVI_JDP, UCBVI_RARELY, UCBVI_LDP, OPTIMISTIC_FREE, PE, UCBVI)
