"""`python -m shufflerl`: the command line."""

from __future__ import annotations

from shufflerl.cli import main

if __name__ == "__main__":  # not when a worker process imports its parent's main module
    main()
