"""The `readyplane` command: what a person asks of a running system, and of this machine.

Each command group has a file of its own. They talk to the services by the ports, over gRPC, as
anybody may; nothing here decides anything.
"""
