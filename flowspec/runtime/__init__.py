"""The real world: ZeroMQ sockets, the daemon and head processes, local clusters."""
