"""The mind of a device that works for a head: as a stage, or as one that holds a drafter."""
