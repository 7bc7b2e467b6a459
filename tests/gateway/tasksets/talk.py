"""The program of the harness: two calls of the model, the second one with a hint."""

import json
import sys
import urllib.request

order = json.loads(sys.argv[1])
messages = [{"role": "user", "content": order["prompt"]}]
for _ in range(2):
    request = urllib.request.Request(
        order["url"] + "/chat/completions",
        json.dumps({"model": order["model"], "messages": messages}).encode(),
        {"Authorization": "Bearer " + order["key"], "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        message = json.load(response)["choices"][0]["message"]
    messages += [message, {"role": "user", "content": "try again"}]
