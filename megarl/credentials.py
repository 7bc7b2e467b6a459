"""Secrets in addresses: masked in everything that is written, and passed to clients through the environment.

tracking.mlflow_uri: https://me:secret@host  ->  https://***@host   in config.yaml, report, parameters, messages
                                                 me, secret         in MLFLOW_TRACKING_USERNAME, _PASSWORD
"""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping
from urllib.parse import quote, unquote, urlsplit

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
    """
    key, equals, value = argument.partition("=")
    if equals and CREDENTIAL.match(key.rpartition(".")[2]):
        return f"{key}={MASK}"
    whole = _WHOLE.match(value)
    if whole is not None:
        value = f"{whole['scheme']}{MASK}@{value[whole.end() :]}"
    return mask(f"{key}{equals}{value}")


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
