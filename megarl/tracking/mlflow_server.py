"""Probe of an MLflow server before MLflow's own client, which retries for minutes."""

from __future__ import annotations

import http.client
import ssl
import urllib.error
import urllib.request
from urllib.parse import urlsplit

from megarl.credentials import mask

_ANSWER_S = 3.0
_GATEWAY_ERRORS = (502, 503, 504)  # proxies' status codes for a server that is down


def unreachable(uri: str) -> str | None:
    """Explain why no server answers at `uri` within seconds; None when one does, or `uri` is no http(s) address.

    Any answer counts, also a refusal: MLflow's client judges user names, certificates and paths. Proxies of the
    environment are used, as by that client.
    """
    parts = urlsplit(uri)
    if parts.scheme not in ("http", "https"):
        return None
    host = parts.netloc.rpartition("@")[2]
    address = parts._replace(netloc=host, path=parts.path.rstrip("/") + "/health", query="", fragment="").geturl()
    try:
        urllib.request.urlopen(address, timeout=_ANSWER_S).close()
    except urllib.error.HTTPError as error:
        return f"HTTP status {error.code}" if error.code in _GATEWAY_ERRORS else None
    except urllib.error.URLError as error:
        return None if isinstance(error.reason, ssl.SSLError) else str(error.reason)
    except (http.client.InvalidURL, ValueError):
        return None  # not an address: MLflow's client reports the error
    except (OSError, http.client.HTTPException) as error:
        return f"{type(error).__name__}: {error}".rstrip(": ")
    return None


def down_text(uri: str, reason: str) -> str:
    """Return the warning for a server that does not answer."""
    return (
        f"tracking.mlflow_uri: MLflow does not answer at {mask(uri)} ({reason}); the run goes on without it and "
        "metrics.jsonl has every number"
    )
