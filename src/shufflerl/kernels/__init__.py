"""Compiled inner loops of the learner `optimistic`. Callers have checked the shapes of arrays."""
