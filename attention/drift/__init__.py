"""Drift of a converted model from its source, layer by layer and at the end."""

from kvfold.attention.drift.report import DriftReport, measure_drift

__all__ = ["DriftReport", "measure_drift"]
