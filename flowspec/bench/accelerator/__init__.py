"""Does this machine's accelerator compute right, and how fast? What `flowspec doctor --accelerator` runs."""
