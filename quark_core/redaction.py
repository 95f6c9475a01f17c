"""Takes secrets out of what is about to be written.

A value is redacted because of its key (`api_key`, `password`, `hf_token` …)
or because of its shape (a known kind of token, a private key, user-info in a
URL). Keys that only sound alike (`num_tokens`, `cls_token`, `max_token_len`)
stay.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

__all__ = ["REDACTED", "redact_arguments", "redact_text", "redact_values"]

REDACTED = "[redacted]"

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_SECRET_WORDS = frozenset(
    """
    password passwords passwd passphrase pwd secret secrets credential credentials apikey apikeys
    authtoken accesskey privatekey
    """.split()
)
_SECRET_PAIRS = frozenset(
    {
        ("access", "key"),
        ("account", "key"),
        ("api", "key"),
        ("auth", "key"),
        ("connection", "string"),
        ("encryption", "key"),
        ("private", "key"),
        ("secret", "key"),
        ("signing", "key"),
        ("ssh", "key"),
        ("user", "key"),
    }
)
# A word before "token" that makes it a token of text, not of access.
_TEXT_TOKENS = frozenset(
    """
    additional audio blank bos class cls cross decoder empty end eos extra first forced image last
    mask max min new newline next num pad per prefix prompt sep sos source special src start stop
    sub suffix target text tgt unk video vocab word
    """.split()
)
_SHAPES = re.compile(
    r"""
      \bsk-(?=[\w-]*\d)[A-Za-z0-9_-]{16,}            # OpenAI, Anthropic
    | \bhf_[A-Za-z0-9]{20,}                          # Hugging Face
    | \bgh[pousr]_[A-Za-z0-9]{20,}                   # GitHub
    | \bgithub_pat_[A-Za-z0-9_]{20,}
    | \bglpat-[A-Za-z0-9_-]{16,}                     # GitLab
    | \b(?:AKIA|ASIA)[0-9A-Z]{16}\b                  # AWS
    | \bAIza[0-9A-Za-z_-]{30,}                       # Google
    | \bxox[abeprs]-[A-Za-z0-9-]{10,}                # Slack
    | \bnpm_[A-Za-z0-9]{30,}
    | \bqk_[A-Za-z0-9]+_(?=[\w-]*\d)[A-Za-z0-9_-]{16,}   # Quark
    | \beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{4,}   # JSON Web Token
    | -----BEGIN\ [A-Z ]*PRIVATE\ KEY-----[\s\S]*?(?:-----END\ [A-Z ]*PRIVATE\ KEY-----|\Z)
    """,
    re.VERBOSE,
)
_USER_INFO = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*://)[^\s/?#]+@")
_URL_SECRET = re.compile(r"(?P<name>[?&;]([A-Za-z_-]+)=)[^\s&;#]+")


def redact_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Copy JSON values with the secrets replaced by `REDACTED`, at any depth."""
    return {key: _redact(key, value) for key, value in values.items()}


def redact_text(text: str) -> str:
    """Replace tokens of known shapes and the user-info and secret parameters of URLs."""
    text = _SHAPES.sub(REDACTED, text)
    text = _USER_INFO.sub(rf"\g<scheme>{REDACTED}@", text)
    return _URL_SECRET.sub(
        lambda m: m["name"] + REDACTED if is_secret_key(m[2], m[0]) else m[0], text
    )


def redact_arguments(arguments: Iterable[str]) -> list[str]:
    """Redact a command line: `--password x`, `--password=x`, `password=x` and shapes."""
    out: list[str] = []
    secret_next = False
    for argument in arguments:
        name, equals, value = argument.partition("=")
        option = argument.startswith("-")
        if secret_next and not option:
            out.append(REDACTED)
        elif equals and is_secret_key(name, value):
            out.append(f"{name}={REDACTED}")
        else:
            out.append(redact_text(argument))
        secret_next = option and not equals and is_secret_key(name, "any value")
    return out


def is_secret_key(key: str, value: object) -> bool:
    """Whether a value under this key is a secret."""
    if value is None or isinstance(value, bool) or value == "":
        return False
    words = [word.lower() for word in _WORDS.findall(key)]
    if not words:
        return False
    if not _SECRET_WORDS.isdisjoint(words):
        return True
    if any((a, b.removesuffix("s")) in _SECRET_PAIRS for a, b in pairwise(words)):
        return True
    if words[-1] == "token" and isinstance(value, str):
        looks_like_text = re.fullmatch(r"[<\[{(].*[>\]})]|.*\s.*", value) is not None
        return _TEXT_TOKENS.isdisjoint(words[:-1]) and (len(words) == 1 or not looks_like_text)
    return words == ["authorization"] or words == ["auth"]


def _redact(key: str, value: Any) -> Any:
    if is_secret_key(key, value):
        return REDACTED
    if isinstance(value, Mapping):
        return {name: _redact(name, item) for name, item in value.items()}
    if isinstance(value, list):
        return [_redact(key, item) for item in value]
    return redact_text(value) if isinstance(value, str) else value
