"""Long checks on real processes: broken peers, requests that mean harm, devices that fail. `python -m
lab.checks.NAME`."""
