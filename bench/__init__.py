"""Benchmarks: figures against a peer or a limit measured in the same run. `python -m bench` runs them all."""
