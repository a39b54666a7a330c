"""The commands inspect, drift, verify, sweep, eval and bench, with their tables, charts and
reports.
"""
