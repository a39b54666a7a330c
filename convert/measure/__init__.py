"""What the commands that measure do and print: inspect, drift, verify, sweep, eval, bench; charts and reports."""
