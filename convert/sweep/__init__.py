"""The split of a budget that a sweep takes."""
