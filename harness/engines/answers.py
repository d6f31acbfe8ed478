"""What a server answers to one question over HTTP: bounded, strict, and an OSError or ValueError where it is none."""

from __future__ import annotations

import http.client
import json
import re
import urllib.request
from typing import Any

from qad.untrusted import mapping, strict_json

_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")  # of Prometheus' text format
_LABEL = re.compile(r'([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"')
LARGEST = 256 * 2**20  # bytes of an answer


def ask(url: str, payload: object = None, *, timeout_s: float = 10.0, proxied: bool = False) -> bytes:
    """The body that a GET, or a POST of `payload` as JSON, is answered with. proxied: by the environment's proxy, if any.

    Raises OSError where nothing answers with success in HTTP, ValueError for an answer that is too large.
    """
    handlers = [] if proxied else [urllib.request.ProxyHandler({})]
    body = None if payload is None else json.dumps(payload).encode()
    request = urllib.request.Request(url, body, {} if payload is None else {"Content-Type": "application/json"})
    try:
        with urllib.request.build_opener(*handlers).open(request, timeout=timeout_s) as answer:
            found: bytes = answer.read(LARGEST + 1)
    except http.client.HTTPException as error:
        raise OSError(f"the answer is no HTTP ({error!r:.100})") from error
    if len(found) > LARGEST:
        raise ValueError(f"the answer has more than {LARGEST:,} bytes")
    return found


def ask_json(url: str, payload: object = None, *, timeout_s: float = 10.0, proxied: bool = False) -> Any:
    """The same, read. Raises ValueError for what is no JSON as well."""
    return strict_json(ask(url, payload, timeout_s=timeout_s, proxied=proxied))


def served_models(root: str, *, timeout_s: float = 10.0, proxied: bool = False) -> list[dict[str, Any]]:
    """The entries of an OpenAI server's list of models, each with a string id. Raises OSError and ValueError as `ask_json`, and
    ValueError for what is no such list."""
    entries = mapping(ask_json(f"{root}/v1/models", timeout_s=timeout_s, proxied=proxied)).get("data")
    if not isinstance(entries, list) or not all(isinstance(mapping(entry).get("id"), str) for entry in entries):
        raise ValueError("its list of models is none")
    return entries


def version_told(root: str) -> str | None:
    """Of an engine's server, by /version; None where it does not say."""
    try:
        told = mapping(ask_json(f"{root}/version")).get("version")
    except (OSError, ValueError):
        return None
    return None if told is None else str(told)


def samples(text: str, name: str) -> list[tuple[dict[str, str], float]]:
    """Of /metrics, in Prometheus' text format: labels and value of every sample of metric `name`; other lines are skipped."""
    found = []
    for line in text.split("\n"):
        match = _SAMPLE.match(line)
        if match is None or match[1] != name:
            continue
        labels = {key: re.sub(r"\\(.)", _unescape, value) for key, value in _LABEL.findall(match[2] or "")}
        try:
            found.append((labels, float(match[3])))
        except ValueError:
            continue
    return found


def _unescape(match: re.Match[str]) -> str:
    return "\n" if match[1] == "n" else match[1]
