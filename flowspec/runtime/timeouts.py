"""Every time-out of the runtime, by name, in seconds."""

from __future__ import annotations

CONNECT_S = 6.0
"""How long a daemon may take to answer the first Hello."""
HELD_S = 15.0
"""How long a head waits for a daemon that another head holds; longer than a dead head's lease."""
LINK_S = 10.0
"""How long a stage may take to reach its next hop."""
PING_EVERY_S = 1.0
LEASE_S = 5.0
"""A head that was silent for so long has let go of its daemons."""
STALL_S = 15.0
"""A daemon that answered no Ping for so long is lost, though its connection stands."""
HEARTBEAT_S = 2.0
HEARTBEAT_TIMEOUT_S = 6.0
"""ZeroMQ's own heartbeats: they notice a cable that was pulled."""
COMPUTE_STOP_S = 1.5
"""How long a stopping daemon waits for the layers that run."""
STOP_S = 4.0
"""How long a process that was asked to stop may take before it is killed."""
LOCAL_START_S = 60.0
"""How long the daemons of a local cluster may take to come up."""
