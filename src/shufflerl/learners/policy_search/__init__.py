"""Policy search: policies of any family as arms, compared by one tag of each user's return (docs/policy-search.md)."""

from __future__ import annotations

from shufflerl.learners.policy_search.learner import PolicySearch

__all__ = ["PolicySearch"]
