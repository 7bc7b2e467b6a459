"""Ask the forker for a worker of Ray, in place of two interpreters that import Ray: the program that Ray starts.

It is Ray's worker, and also what sets up a worker's environment before that.
"""

import argparse
import json
import os
import re
import socket

parser = argparse.ArgumentParser(allow_abbrev=False)
parser.add_argument("--serialized-runtime-env-context", default="{}")
parser.add_argument("--language")
given, arguments = parser.parse_known_args()
context = json.loads(given.serialized_runtime_env_context)
assert not context.get("command_prefix"), "nothing but variables is set up here"
for name, value in context.get("env_vars", {}).items():  # as Ray does
    os.environ[name] = re.sub(r"\$\{[A-Z0-9_]+\}", "", os.path.expandvars(value))
arguments = arguments[arguments.index(__file__) + 1 :]
with socket.socket(socket.AF_UNIX) as forker:
    forker.connect(os.environ["MEGARL_TEST_RAY_FORKER"])
    request = {"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd()}
    socket.send_fds(forker, [json.dumps(request).encode() + b"\n"], [0, 1, 2])
    forker.recv(1)  # nothing: it is closed when the worker has begun
