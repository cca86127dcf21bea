"""One family of errors; every message says what was wrong, where, and what to do."""


class FasterISNetError(Exception):
    """Base of everything this package raises on purpose."""


class InputError(FasterISNetError, ValueError):
    """An argument, image, mask or model that cannot be used as given."""


class UsageError(InputError):
    """An option, path or configuration that was given wrongly: nothing was begun."""


class RuleError(FasterISNetError, RuntimeError):
    """An operation or layer that relevance cannot be propagated through as asked."""


class NonFiniteError(FasterISNetError, ArithmeticError):
    """Values that vanished, exploded or are not numbers."""


class RuleWarning(UserWarning):
    """Relevance went through an operation that has no rule of its own."""
