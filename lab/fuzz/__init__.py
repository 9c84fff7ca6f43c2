"""Fuzzing of what a device takes from others: the codec and both cores, with frames that nobody correct would
send."""
