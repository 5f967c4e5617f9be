"""Readyplane: the parts every service, worker and user knows."""

import os

# grpc's core reads these once, when it is imported: hence here, before anything of ours can do that.
# It writes to stderr by itself, about ends and forks that our own logs already tell. And in each fork
# it stops its threads and starts them again, on both sides, which is not safe while calls are under
# way; nobody forks here but to start another program.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
