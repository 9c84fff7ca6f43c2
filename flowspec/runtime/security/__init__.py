"""Who may speak on a cluster's links, and as whom: key files, the keys of one process, and the gate of a
daemon's port."""
