"""What a change of names and places must leave as it is: runs, certificates and the quick reproduction, as files.

python -m tests.behaviour before/  # at one commit
python -m tests.behaviour after/  # at another
diff --recursive before after
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from shufflerl import results

COMMANDS = """
learners
run riverswim --epsilon 1 --seeds 3
run riverswim --seeds 2
run riverswim --epsilon 0.25 --seeds 2 --seed 7 --privatizer-param noise=servers
run riverswim --learner sdp-pe --epsilon 1 --seeds 3
run riverswim --learner ucbvi --privatizer central --epsilon 1 --seeds 2
run riverswim --learner ucbvi --privatizer local --epsilon 1 --episodes 5000
run spectrum --learner sdp-pe --epsilon 2 --seeds 2
run deepsea --epsilon 4 --seeds 2
run bandit --learner contextual-bandit --epsilon 1 --seeds 2
run riverswim --learner policy-search --epsilon 4 --episodes 20000
run CartPole-v1 --learner policy-search --epsilon 4 --episodes 3000
run FrozenLake-v1 --epsilon 2 --episodes 5000
calibrate --epsilon 1
calibrate --epsilon 0.3 --noise servers
calibrate --epsilon 4 --horizon 10 --states 8 --gamma 0.5
certify --lambda 500
certify --scale 20 --shift 300 --noise servers
certify --lambda 300 --participations 3 --gamma 0.7
"""


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _timeless(part) for key, part in value.items() if "seconds" not in key}
    return [_timeless(part) for part in value] if isinstance(value, list) else value


def write(folder: Path) -> None:
    """What every command prints as JSON, and the cells of a quick reproduction, all without times."""
    folder.mkdir(parents=True)
    program = Path(sys.executable).with_name("shufflerl")
    for command in COMMANDS.strip().splitlines():
        done = subprocess.run([program, *command.split(), "--json"], capture_output=True, text=True, check=True)
        text = json.dumps(_timeless(json.loads(done.stdout)), indent=1)
        (folder / f"{command.replace('/', '-')}.json").write_text(text)
    subprocess.run([program, "reproduce", "--quick", "--out", folder / "quick"], capture_output=True, check=True)
    cells = results.load(folder / "quick" / "runs").drop_columns(["seconds"]).to_pylist()
    shutil.rmtree(folder / "quick")
    (folder / "cells.json").write_text("\n".join(sorted(json.dumps(cell, default=str) for cell in cells)))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
