"""These runs are not about their pictures."""

from sketches import sketches

__all__ = ["sketches"]
