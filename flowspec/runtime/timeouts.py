"""Every time-out of the runtime, by name, in seconds."""

from __future__ import annotations

CONNECT_S = 6.0
"""How long a daemon may take to answer the first Hello."""
ABSENT_S = 3.0
"""The same at the start of a head that may begin without some: all are waited for at once."""
WHY_S = 1.0
"""How long it may then take to find out why one is silent."""
RECONNECT_S = 3.0
"""The same where a new pipeline is formed of daemons that were there a moment ago."""
HELD_S = 15.0
"""How long a head waits at most for a daemon whose head may have died; longer than such a one's lease."""
SETTLE_S = 0.1
"""How long the closing of a lost device's connections may take to show on all of them."""
LOOK_UP_S = 3.0
"""How long the look-up of a device's name is waited for where no address of it is known."""
FRESH_S = 30.0
"""How old an address may be before its name is looked up again; the old one is used until another is found.
"""
LOOK_UP_AGAIN_S = 2.0
"""How long a look-up that failed is not tried again."""
LINK_S = 10.0
"""How long a stage may take to reach its next hop."""
PING_EVERY_S = 1.0
LEASE_S = 5.0
"""A head that was silent for so long has let go of its daemons."""
SILENT_S = 5.0
"""A daemon that answered no Ping for so long is lost, though its connection stands."""
LOADING_SILENT_S = 30.0
"""The same while daemons load: their imports hold up everything else, for 15 s and more on a busy machine."""
LOADING_S = 180.0
"""A daemon that answers, but whose loading makes no progress for so long, is lost."""
STUCK_S = 60.0
"""A daemon that has got no further with a segment for so long, and ten times its longest pass that ended, is
lost, and so is a segment that nobody is at; see `core/cluster/membership.py`."""
PROBE_EVERY_S = 2.0
"""How often a lost device is asked whether it is there again."""
BACK_S = 4.0
"""How long a lost device stays out at least; twice as long with each loss, ..."""
FORGIVE_S = 300.0
"""... until it has done its part for so long."""
WATCH_EVERY_S = 0.5
"""How often the head looks who is silent."""
CHANGED_S = 60.0
"""For how long of its work a stage must be a fifth slower, or faster, than when its pipeline was formed for
another plan to be made; ..."""
AGAIN_S = 600.0
"""... and how long no further one is made then."""
WAIT_FOR_DEVICES_S = 120.0
"""How long `generate` waits for devices to come back where the model does not fit on those that are left."""
HEARTBEAT_S = 2.0
HEARTBEAT_TIMEOUT_S = 6.0
"""ZeroMQ's own heartbeats: they notice a cable that was pulled."""
UNACKNOWLEDGED_S = 20.0
"""How long nothing of what was sent on a connection without heartbeats may be acknowledged before the system
closes it: what lies before it in the queue of a slow link takes its time."""
COMPUTE_STOP_S = 1.5
"""How long a stopping daemon waits for the layers that run."""
STOP_S = 4.0
"""How long a process that was asked to stop may take before it is killed."""
LOCAL_START_S = 180.0
"""How long the daemons of a local cluster may take to come up; from a slow card that takes a while."""
