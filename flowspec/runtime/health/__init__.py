"""The health of a cluster: what a device can tell about itself, how to ask for it, and what is wrong."""
