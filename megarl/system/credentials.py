"""Secrets: refused in a recipe, masked in everything that is written, passed to clients through the environment.

tracking.mlflow_uri: https://me:secret@host  ->  https://***@host   in config.yaml, report, parameters, messages
                                                 me, secret         in MLFLOW_TRACKING_USERNAME, _PASSWORD
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote, urlsplit

if TYPE_CHECKING:
    import yaml

MASK = "***"
USER, PASSWORD = "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"
_OWNERS = (
    "access|anthropic|api|auth|aws|azure|bearer|client|gemini|github|google|hf|hub|judge|mistral|openai|openrouter"
    "|private|refresh|secret|service|session|signing|subscription|together|wandb"
)
_NO_SWITCH = r"^(?!.*(?:^|_)(?:disable|enable|use|no)_)"
_ENDS = rf"password|passwd|passphrase|secret|auth|authorization|bearer|.+_pwd|(?:{_OWNERS})_?key"
CREDENTIAL = re.compile(rf"(?i){_NO_SWITCH}(?:.*_)?(?:token|{_ENDS})$")
"""Pattern of environment variables that hold a secret. TOKENIZERS_PARALLELISM and paths of files do not match."""
_RECIPE_KEY = re.compile(rf"(?i){_NO_SWITCH}(?:token|(?:.*_)?(?:{_ENDS}|(?:{_OWNERS})_?token))$")
"""Pattern of recipe keys that hold a secret: `hf_token` matches, `pad_token` and `answer_key` do not."""
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
#: Recipe keys that name a secret object of a cluster, which is no secret itself.
_REFERENCES = ("launch.kubernetes.secrets", "launch.kubernetes.image_pull_secret")
#: Keys whose values are never masked, because they may be prompts for the model: a prompt given on the command line is
#: an entry of `data.val_files`. An address with a password in a prompt is a part of the prompt.
_TEXTS = ("data.system_prompt", "data.val_files")


def _userinfo(ends: str) -> re.Pattern[str]:
    """Return the regular expression for the scheme and credentials of a URL. A match ends before any character of the
    class `ends`. The password of a database may contain unescaped `/`, `?` and `#`.
    """
    database = rf"(?<!http://)(?<!https://)(?!\*\*\*@)[^/:{ends}]*:[^@{ends}]*(?:@[^?{ends}]*)?"
    # bounded, because matching a long text of such letters would take quadratic time
    scheme = r"[A-Za-z][\w+.-]{0,30}://"
    return re.compile(rf"(?P<scheme>{scheme})(?P<userinfo>{database}|[^/?#{ends}]+)@", re.ASCII | re.IGNORECASE)


_IN_TEXT, _WHOLE = _userinfo(r"\s'\""), _userinfo("")
_SECRET_PARAMETER = re.compile(
    r"(?P<name>[?&](?:[\w.-]*(?:password|passwd|pwd|secret|token|(?:api|access|secret|subscription)[_-]?key|signature|sig)"
    r"|key|auth|authorization|bearer)=)[^&\s#'\"]+",
    re.IGNORECASE,
)
_ISSUED = re.compile(
    r"\bsk-(?=[\w-]*\d)(?=[\w-]*[A-Z])[\w-]{20,}|\bhf_[A-Za-z0-9]{30,}|\bgh[opsu]_[A-Za-z0-9]{36,}|\bAKIA[0-9A-Z]{16}\b"
    r"|\bAIza[\w-]{35}|\bxox[abprs]-[\w-]{10,}|\beyJ[\w-]{10,}\.eyJ[\w-]{10,}[\w.-]*"
    r"|(?<=\b[Bb]earer )[\w.~+/=-]{16,}"
)
"""Formats in which providers issue keys and tokens."""


def mask(text: str) -> str:
    """Return `text` without user names, passwords and secret parameters in addresses, and without keys in providers'
    formats.

    >>> mask("postgresql://me:a@b@host/db?sslmode=require&password=x")
    'postgresql://***@host/db?sslmode=require&password=***'
    """
    text = _SECRET_PARAMETER.sub(rf"\g<name>{MASK}", _IN_TEXT.sub(rf"\g<scheme>{MASK}@", text))
    return _ISSUED.sub(MASK, text)


def hide(recipe: Any) -> tuple[Any, list[str]]:
    """Return the plain data of a recipe with its secrets masked, and the dotted paths of the masked values.

    >>> hide({"env": {"apiKey": "a", "n": 2, "args": ["--token", "t"]}})
    ({'env': {'apiKey': '***', 'n': 2, 'args': ['--token', '***']}}, ['env.apiKey', 'env.args'])
    """
    places: dict[str, None] = {}
    return _hidden(recipe, "", places), list(places)


def _hidden(value: Any, path: str, places: dict[str, None], *, secret: bool = False) -> Any:
    """Return `value`, found at `path`, with secrets masked (all of it if `secret`); add their paths to `places`."""
    if path in (*_REFERENCES, *_TEXTS):
        return value
    masked = value
    if isinstance(value, dict):
        below = f"{path}." if path else ""
        masked = {
            name: _hidden(inner, f"{below}{name}", places, secret=secret or _names_secret(str(name), inner))
            for name, inner in value.items()
        }
    elif isinstance(value, list):
        options = ["", *(entry if isinstance(entry, str) and entry.startswith("-") else "" for entry in value)]
        masked = [
            _hidden(entry, path, places, secret=secret or _names_secret(option))
            for entry, option in zip(value, options, strict=False)
        ]
    elif secret and value not in (None, "", MASK) and not isinstance(value, bool):
        masked = MASK
    elif isinstance(value, str):
        option, equals, _ = value.partition("=")
        shown = f"{option}={MASK}" if equals and _names_secret(option) else mask(value)
        masked = value if shown == value else shown
    if masked is not value and not isinstance(value, (dict, list)):
        places[path] = None
    return masked


def _names_secret(name: str, value: Any = "") -> bool:
    return _RECIPE_KEY.match(_plain_name(name)) is not None and not _is_token_id(name, str(value))


def _is_token_id(name: str, value: str) -> bool:
    """Return whether a value is a token id, such as `stop_token: 13`, and not a numeric password."""
    return _plain_name(name).lower().endswith("token") and re.fullmatch(r"\d{1,7}", value) is not None


def mask_argument(argument: str) -> str:
    """Return an argument of a command line, perhaps `key.path=value`, without secrets.

    >>> [mask_argument(a) for a in ("a.uri=https://me:it's@host", "reward.kwargs.api_key=sk-1", "trainer.steps=3")]
    ['a.uri=https://***@host', 'reward.kwargs.api_key=***', 'trainer.steps=3']
    >>> mask_argument("reward.kwargs={api_key: sk-1, n: 2}")
    'reward.kwargs={api_key: "***", n: 2}'
    """
    key, equals, value = argument.partition("=")
    if equals and _is_secret(key, value):
        return f"{key}={MASK}"
    whole = _WHOLE.match(value)
    if whole is not None:
        value = f"{whole['scheme']}{MASK}@{value[whole.end() :]}"
    return mask(key + equals) + mask_yaml(value)


def mask_yaml(text: str) -> str:
    """Return YAML `text` with secrets masked: values of secret keys, of secret options in lists, and what `mask` finds.

    >>> mask_yaml("args: [--api-key, sk-1, --n, 2, --token=t]")
    'args: [--api-key, "***", --n, 2, "--token=***"]'
    """
    import yaml  # here, because agents run with interpreters that do not have it

    try:
        root = yaml.compose(text, yaml.SafeLoader)
    except yaml.YAMLError:  # malformed values are refused where they are read
        return mask(text)
    for start, end, instead in sorted(_secrets(root), reverse=True):
        old = text[start:end]
        # Keep whitespace at the end of the value: a block scalar includes the line break before the next key.
        text = text[:start] + instead + old[len(old.rstrip()) :] + text[end:]
    return mask(text)


def _secrets(node: yaml.Node | None, inside: bool = False) -> Iterator[tuple[int, int, str]]:
    """Yield (start, end, replacement) of each secret in a document. With `inside`, all values are secret."""
    import yaml

    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            text = value.value if isinstance(value, yaml.ScalarNode) else ""
            yield from _secrets(value, inside or (isinstance(key, yaml.ScalarNode) and _is_secret(key.value, text)))
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


def _is_secret(name: str, value: str = "") -> bool:
    """Return whether `value` of a key `a.b.name` or an option `--name` is a secret."""
    name = name.rpartition(".")[2]
    return CREDENTIAL.match(_plain_name(name)) is not None and not _is_token_id(name, value)


def _plain_name(name: str) -> str:
    """Return an option's name as words joined by underscores: `--apiKey` as `api_Key`."""
    return _CAMEL.sub("_", name.lstrip("-").replace("-", "_"))


def take_out(uri: str, environment: MutableMapping[str, str]) -> str:
    """Move the user name and password of `uri` to the variables in `environment` that MLflow's client reads; return
    `uri` with a mask in their place."""
    userinfo = _WHOLE.match(uri)
    if userinfo is None or userinfo["userinfo"] == MASK:
        return uri
    user, _, password = userinfo["userinfo"].partition(":")
    environment[USER], environment[PASSWORD] = unquote(user), unquote(password)
    return f"{userinfo['scheme']}{MASK}@{uri[userinfo.end() :]}"


def put_back(uri: str, environment: Mapping[str, str]) -> str:
    """Return the address to connect to: the result of `take_out`, completed from `environment`. MLflow's client itself
    reads the variables for http and https if both are set; for a database or a server without password, user name and
    password are put into the address. Raise KeyError if a variable is not set.
    """
    address = _WHOLE.match(uri)
    if address is None or address["userinfo"] != MASK:
        return uri
    user, password = quote(environment[USER], safe=""), quote(environment[PASSWORD], safe="")
    known = f"{user}@"
    if password:
        known = "" if urlsplit(uri).scheme in ("http", "https") else f"{user}:{password}@"
    return address["scheme"] + known + uri[address.end() :]
