"""Literal float64 transcriptions of the attention formulas: the oracles of every fast path."""
