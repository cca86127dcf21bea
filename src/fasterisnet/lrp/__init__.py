"""The engine: LRP as gradient times input with a few corrected operations, for any network."""
