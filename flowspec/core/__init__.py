"""The pure heart: messages, and the two state machines that speak them.

Synchronous and free of I/O: an event goes in, commands come out. No torch, zmq, clock, random or threads
here; the ZeroMQ runtime and the simulator are two executors of the same commands.
"""
