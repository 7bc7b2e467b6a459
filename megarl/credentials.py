"""Secrets in addresses: masked in everything that is written, and passed to clients through the environment.

tracking.mlflow_uri: https://me:secret@host  ->  https://***@host   in config.yaml, report, parameters, messages
                                                 me, secret         in MLFLOW_TRACKING_USERNAME, _PASSWORD
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, MutableMapping
from urllib.parse import quote, unquote, urlsplit

import yaml

MASK = "***"
USER, PASSWORD = "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"
CREDENTIAL = re.compile(
    r"(?i)^(?!.*(?:^|_)(?:disable|enable|use|no)_)(?:.*_)?(?:token|secret|password|passwd|passphrase|(?:api|access|secret|private)_?key)$"
)
"""The end of a variable's name whose value is one; TOKENIZERS_PARALLELISM and paths of files are none."""


def _userinfo(ends: str) -> re.Pattern[str]:
    """Return the pattern of scheme and credentials of an address that ends at `ends`, the body of a character class.

    A database's password may contain `/`, `?` and `#` unescaped; a path with an @ before it begins with a slash.
    """
    database = rf"(?<!http://)(?<!https://)(?!\*\*\*@)[^/:{ends}]*:[^@{ends}]*(?:@[^?{ends}]*)?"
    scheme = r"[A-Za-z][\w+.-]{0,30}://"  # bounded: a long text of such letters would take the square of its length
    return re.compile(rf"(?P<scheme>{scheme})(?P<userinfo>{database}|[^/?#{ends}]+)@", re.ASCII | re.IGNORECASE)


_IN_TEXT, _WHOLE = _userinfo(r"\s'\""), _userinfo("")
_SECRET_PARAMETER = re.compile(
    r"(?P<name>[?&][\w.-]*(?:password|passwd|pwd|secret|token|(?:api|access|secret)_?key|signature|sig)=)[^&\s#'\"]+",
    re.IGNORECASE,
)


def mask(text: str) -> str:
    """Return `text` without user names and passwords in its addresses, and without their secret-looking parameters.

    >>> mask("postgresql://me:a@b@host/db?sslmode=require&password=x")
    'postgresql://***@host/db?sslmode=require&password=***'
    """
    return _SECRET_PARAMETER.sub(rf"\g<name>{MASK}", _IN_TEXT.sub(rf"\g<scheme>{MASK}@", text))


def mask_argument(argument: str) -> str:
    """Return an argument of a command line, perhaps `key.path=value`, without secrets.

    >>> [mask_argument(a) for a in ("a.uri=https://me:it's@host", "reward.kwargs.api_key=sk-1", "trainer.steps=3")]
    ['a.uri=https://***@host', 'reward.kwargs.api_key=***', 'trainer.steps=3']
    >>> mask_argument("reward.kwargs={api_key: sk-1, n: 2}")
    'reward.kwargs={api_key: "***", n: 2}'
    """
    key, equals, value = argument.partition("=")
    if equals and _is_secret(key):
        return f"{key}={MASK}"
    whole = _WHOLE.match(value)
    if whole is not None:
        value = f"{whole['scheme']}{MASK}@{value[whole.end() :]}"
    return mask(key + equals) + mask_yaml(value)


def mask_yaml(text: str) -> str:
    """Return YAML `text` without secrets: values of keys and of options in lists, and those of `mask`.

    >>> mask_yaml("args: [--api-key, sk-1, --n, 2, --token=t]")
    'args: [--api-key, "***", --n, 2, "--token=***"]'
    """
    try:
        root = yaml.compose(text, yaml.SafeLoader)
    except yaml.YAMLError:  # a value that is refused where it is read
        return mask(text)
    for start, end, instead in sorted(_secrets(root), reverse=True):
        old = text[start:end]
        text = text[:start] + instead + old[len(old.rstrip()) :] + text[end:]  # a block ends with its line
    return mask(text)


def _secrets(node: yaml.Node | None, inside: bool = False) -> Iterator[tuple[int, int, str]]:
    """Yield places in a document, and what to put there. `inside`: all values are secret."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield from _secrets(value, inside or (isinstance(key, yaml.ScalarNode) and _is_secret(key.value)))
    elif isinstance(node, yaml.SequenceNode):
        option = ""
        for entry in node.value:
            yield from _secrets(entry, inside or _is_secret(option))
            text = entry.value if isinstance(entry, yaml.ScalarNode) else ""
            name, equals, _ = text.partition("=")
            if equals and not inside and _is_secret(name):
                yield entry.start_mark.index, entry.end_mark.index, f'"{name}={MASK}"'
            option = text if text.startswith("-") else ""
    elif isinstance(node, yaml.ScalarNode) and inside and node.tag != "tag:yaml.org,2002:null":
        yield node.start_mark.index, node.end_mark.index, f'"{MASK}"'


def _is_secret(name: str) -> bool:
    """Tell whether the value of `a.b.name` or `--name` is a secret."""
    return CREDENTIAL.match(name.rpartition(".")[2].lstrip("-").replace("-", "_")) is not None


def take_out(uri: str, environment: MutableMapping[str, str]) -> str:
    """Return `uri` masked; its user name and password go to the variables of MLflow's own client in `environment`."""
    found = _WHOLE.match(uri)
    if found is None or found["userinfo"] == MASK:
        return uri
    user, _, password = found["userinfo"].partition(":")
    environment[USER], environment[PASSWORD] = unquote(user), unquote(password)
    return f"{found['scheme']}{MASK}@{uri[found.end() :]}"


def put_back(uri: str, environment: Mapping[str, str]) -> str:
    """Return the address to connect to: that of `take_out`, completed from `environment`.

    MLflow's client reads the variables itself for http and https, if both are set; a database, and a server that needs
    only a user name, gets them in its address.

    Raises:
        KeyError: a variable is not set.
    """
    found = _WHOLE.match(uri)
    if found is None or found["userinfo"] != MASK:
        return uri
    user, password = quote(environment[USER], safe=""), quote(environment[PASSWORD], safe="")
    known = f"{user}@"
    if password:
        known = "" if urlsplit(uri).scheme in ("http", "https") else f"{user}:{password}@"
    return found["scheme"] + known + uri[found.end() :]
