"""Every error a user can meet. Flat: one base, one class per kind of trouble."""

from __future__ import annotations


class ShuffleRLError(Exception):
    """Base of all errors raised on purpose; its text says what was wrong, what was expected and what to do."""


class InvalidInputError(ShuffleRLError, ValueError):
    """A value that cannot be right: wrong shape, range or type."""


class UnknownNameError(InvalidInputError):
    """A name nobody registered; the text suggests the nearest one."""


class ContractError(ShuffleRLError):
    """Pieces put together in the wrong order: a release for another batch, a batch answered twice."""


class StateMismatchError(ShuffleRLError):
    """A saved state that belongs to another problem, learner, file or version."""


class MissingExtraError(ShuffleRLError, ImportError):
    """An optional dependency is not installed; the text names the extra that brings it."""


class StorageError(ShuffleRLError):
    """A folder or disk that cannot be read or written; what was stored before is whole."""


class LostWorkersError(ShuffleRLError):
    """Processes or machines that died while they computed; what they had handed in is kept."""


class BudgetExceededError(ShuffleRLError):
    """A release that would spend more privacy than the budget allows; nothing was released."""


class AccountingError(ShuffleRLError):
    """The accountant cannot certify the figure asked for, so it gives none."""


class PrivacyWarning(UserWarning):
    """A budget that is allowed but protects less than its name suggests."""
