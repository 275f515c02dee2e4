"""On the path of a process, what its users did is written down as well: the very thing that must not be known.

Python imports this by itself where its folder is on PYTHONPATH. A line of RECORDING is one report: its batch, the true
tags of the episode, and all tags that were sealed.
"""

import fcntl
import json
import os
import sys

if "--multiprocessing-fork" in sys.orig_argv:  # a worker, where episodes are played
    from shufflerl.network.node import reporting

    randomize = reporting.randomize_episode

    def recorded(agreement, trajectory):  # type: ignore[no-untyped-def]
        tags = randomize(agreement, trajectory)
        true = agreement.query.tags(trajectory)[0]
        line = {"batch": agreement.batch.index, "true": true.tolist(), "sent": tags.tolist()}
        with open(os.environ["RECORDING"], "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(json.dumps(line) + "\n")
        return tags

    reporting.randomize_episode = recorded
