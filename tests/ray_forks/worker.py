"""Ask the forker for a worker of Ray, in place of an interpreter that imports Ray: the program that Ray starts."""

import json
import os
import socket
import sys

with socket.socket(socket.AF_UNIX) as forker:
    forker.connect(os.environ["MEGARL_TEST_RAY_FORKER"])
    request = {"arguments": sys.argv[1:], "environment": dict(os.environ), "folder": os.getcwd()}
    socket.send_fds(forker, [json.dumps(request).encode() + b"\n"], [0, 1, 2])
    forker.recv(1)  # nothing: it is closed when the worker has begun
