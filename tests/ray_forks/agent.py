"""Stand in for the dashboard's agent of a node, which takes 0.8 CPU-seconds, and more with time.

Nobody reads its metrics in tests. The node manager waits for the ports that it writes, and ends when it ends.
"""

import os
import sys
import time

node_manager = os.getppid()
given = dict(argument.removeprefix("--").split("=", 1) for argument in sys.argv[1:] if "=" in argument)
for service in ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port"):
    file = os.path.join(given["session-dir"], f"{service}_{given['node-id']}")
    with open(f"{file}.new", "w") as port:
        port.write("-1")  # Ray's number for a service that is not there
    os.rename(f"{file}.new", file)
while os.getppid() == node_manager:
    time.sleep(0.5)
