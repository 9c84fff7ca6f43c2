"""Long checks: thousands of schedules, broken peers and files, killed processes. `python -m
tests.checks.NAME`."""
