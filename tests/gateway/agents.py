"""Agents as users write them, without a client's package: functions that call the endpoint."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import Any


def post(path: str, **body: Any) -> dict[str, Any]:
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + path,
        json.dumps({"model": "policy", **body}).encode(),
        {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=600) as response:
        return json.load(response)


def say(messages: list[dict[str, Any]], **body: Any) -> dict[str, Any]:
    return post("/chat/completions", messages=messages, **body)["choices"][0]


def guess(task: dict[str, Any]) -> dict[str, Any]:
    """Two turns: the row's prompt, and one that quotes the first answer."""
    messages = [{"role": "user", "content": task["row"]["prompt"]}]
    first = say(messages)["message"]
    messages += [first, {"role": "user", "content": "+"}]
    second = say(messages, return_token_ids=True)
    print("said", first["content"], second["message"]["content"])
    return {"reward": float(second["token_ids"][0]), "info": {"asked": 2}}


def asks_thrice(task: dict[str, Any]) -> float:
    """Three turns with the digits in the replies as the score, for models that know nothing."""
    messages = [{"role": "user", "content": task["row"]["prompt"]}]
    for _ in range(3):
        messages += [say(messages)["message"], {"role": "user", "content": "+"}]
    return sum(c.isdigit() for message in messages[1::2] for c in message["content"]) / 12


def attempts(task: dict[str, Any]) -> float:
    """One turn, then three attempts at the next one."""
    messages = [{"role": "user", "content": task["row"]["prompt"]}]
    messages += [say(messages)["message"], {"role": "user", "content": "+"}]
    return float(len(post("/chat/completions", messages=messages, n=3)["choices"]))


def debate(task: dict[str, Any]) -> dict[str, Any]:
    """A proposer, two solvers of its words, a second turn of the first one, and a judge."""
    ask = lambda model, *texts: say([{"role": "user", "content": text} for text in texts], model=model)["message"]  # noqa: E731
    said = ask("proposer", task["row"]["prompt"])["content"]
    first, _ = (ask("solver", said) for _ in range(2))
    say([{"role": "user", "content": said}, first, {"role": "user", "content": "+"}], model="solver")
    ask("judge", said)
    with contextlib.suppress(urllib.error.HTTPError):
        ask("policy", said)
    return task["row"]["result"]


def asks_slowly(task: dict[str, Any]) -> float:
    """The same with pauses, so that something can happen between two calls."""
    time.sleep(1)
    score = asks_thrice(task)
    time.sleep(1)
    return score


def branches(task: dict[str, Any]) -> float:
    """A line of two calls, a sibling of the second one, a sub-agent, and the first line again."""
    messages = [{"role": "user", "content": task["row"]["prompt"]}]
    messages += [say(messages)["message"], {"role": "user", "content": "+"}]
    more = say(messages)["message"]
    say(messages)
    say([{"role": "user", "content": "-"}])
    say([*messages, more, {"role": "user", "content": "="}])
    return 1.0


def titles(task: dict[str, Any]) -> float:
    """A line of two calls, and a side call for a title."""
    messages = [{"role": "user", "content": task["row"]["prompt"]}]
    say([*messages, say(messages)["message"], {"role": "user", "content": "+"}])
    say([{"role": "system", "content": "-"}, *messages])
    return 1.0


def asks_on(task: dict[str, Any]) -> float:
    """Ask until the answer is that the episode is over, and leave a result."""
    try:
        while True:
            say([{"role": "user", "content": "1"}])
            time.sleep(0.05)
    except urllib.error.HTTPError as error:
        return 0.5 if error.code == 410 else 0.0


def uses_a_slow_tool(task: dict[str, Any]) -> float:
    """Ask, use a tool for two seconds, and ask again."""
    messages = [{"role": "user", "content": task["row"]["prompt"]}] if task["row"]["calls"] else []
    if messages:
        messages.append(say(messages)["message"])
    time.sleep(2)
    try:
        say([*messages, {"role": "user", "content": "+"}])
    except urllib.error.HTTPError as error:
        return 0.25 if error.code == 410 else 0.0
    return 1.0


def leaves(task: dict[str, Any]) -> float:
    """Close the connection of a long call after a moment, and make another call."""
    host = urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"])
    body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": task["row"]["prompt"]}]}).encode()
    head = f"POST {host.path}/chat/completions HTTP/1.1\r\nHost: {host.netloc}\r\nContent-Length: {len(body)}\r\n"
    with socket.create_connection((host.hostname, host.port)) as connection:
        connection.sendall(f"{head}Authorization: Bearer {os.environ['OPENAI_API_KEY']}\r\n\r\n".encode() + body)
        time.sleep(0.3)
    say([{"role": "user", "content": task["row"]["prompt"]}], max_tokens=2)
    return 1.0


def helped(task: dict[str, Any]) -> float:
    """A line of two calls, a call of a sub-agent, and another answer to the first question."""
    messages = [{"role": "user", "content": task["row"]["prompt"]}]
    more = [*messages, say(messages)["message"], {"role": "user", "content": "+"}]
    say(more)
    say([{"role": "system", "content": "-"}, *messages])
    say(messages)
    return 1.0


def shown(url: str, text: str) -> dict[str, Any]:
    image = {"type": "image_url", "image_url": {"url": url}}
    return {"role": "user", "content": [image, {"type": "text", "text": text}]}


def asks_about_a_picture(task: dict[str, Any]) -> None:
    """Ask what the row asks, with its picture."""
    [url] = task["row"]["images"]
    say([shown(url, task["row"]["prompt"].removeprefix("<image>"))])


def asks_about_its_half(task: dict[str, Any]) -> None:
    """The same, then a question about a half of the picture, which a helper is asked, too."""
    from PIL import Image

    [url] = task["row"]["images"]
    messages = [shown(url, task["row"]["prompt"].removeprefix("<image>"))]
    messages.append(say(messages)["message"])
    picture, file = Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))), io.BytesIO()
    picture.crop((0, 0, 16, 32)).resize((32, 32)).save(file, "PNG")
    half = shown(f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}", "l?")
    say([*messages, half])
    say([half])


def silent(task: dict[str, Any]) -> dict[str, Any]:
    return {"reward": 0.25, "info": {"asked": 0}}


def stops(task: dict[str, Any]) -> float:
    choice = say([{"role": "user", "content": "1"}], stop="3", max_tokens=6)
    return float(len(choice["message"]["content"]))


def talks_on(task: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": "1"}]
    while True:
        try:
            messages += [say(messages)["message"], {"role": "user", "content": "+"}]
        except urllib.error.HTTPError as error:
            raise ValueError(f"{error.code}, again: {error.headers['x-should-retry']}") from error


def crashes(task: dict[str, Any]) -> None:
    raise KeyError("a defect of the agent")


def gives_up(task: dict[str, Any]) -> None:
    """Exits with a text, as programs do."""
    sys.exit("a reason to give up")


def kills(task: dict[str, Any]) -> float:
    """End the process that starts the agents, as someone may who ends processes by hand."""
    if task["row"]["prompt"] == "0":
        with open(f"/proc/{os.getppid()}/stat") as file:
            os.kill(int(file.read().rpartition(")")[2].split()[1]), 9)
        time.sleep(60)
    say([{"role": "user", "content": "1"}])
    return 1.0


def hangs(task: dict[str, Any]) -> None:
    """Start a process in a session of its own, and never end."""
    say([{"role": "user", "content": "1"}])
    code = "import os, time; os.setsid(); time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", code])
    with open(task["row"]["pids"], "w") as file:
        file.write(f"{child.pid} {os.getpid()}")
    time.sleep(600)
