"""Keeping credentials out of what is written: run.json, reports, messages."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, get_args
from urllib.parse import unquote

from pipeline.config import ColumnType

REMOVED = "(removed)"

_SECRET_WORDS = {
    *("secret", "secrets", "password", "passwd", "pwd", "passphrase", "credential", "credentials", "apikey", "auth"),
    *("authorization", "bearer", "cookie", "signature", "sig", "token", "authtoken", "accesstoken"),
}
_SECRET_KEY = re.compile(r"(^|_)((api|access|private|secret|account|sas|ssh|encryption)_?)?key(_id)?$")
_SIGNING_KEYS = ("x-amz-", "x-goog-")  # query keys of presigned URLs
_COLUMN_TYPES = get_args(ColumnType)
_WORD_BREAK = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|[^A-Za-z0-9]+")
# scheme://[userinfo@]rest[?query or #fragment]; a password may hold a raw "/" (AWS secrets do), a port may not be one.
_URI = re.compile(
    r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://"
    r"(?:[^\s/?#]*@|[^\s/@:?#]*:(?!\d+(?:/|\s|$))[^\s@]*@)?"
    r"(?P<rest>[^\s?#\"'<>]*)(?P<query>[?#][^\s\"'<>]*)?"
)


def scrub(value: Any) -> Any:
    """`value` as plain JSON types, without credentials: values under credential-like keys are blanked, URIs lose their
    userinfo and query strings that hold a credential. A column type's name is none (`keep_columns: {token: string}`).
    Numbers that JSON lacks (NaN, infinities) become None."""
    if isinstance(value, Mapping):
        return {str(key): _scrub_item(str(key), item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [scrub(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int) else scrub_text(str(value))


def _scrub_item(key: str, value: Any) -> Any:
    return REMOVED if value not in (None, "", *_COLUMN_TYPES) and _is_secret(key) else scrub(value)


def _is_secret(key: str) -> bool:
    """`hf_token`, `awsSecretAccessKey`, `password`, ...; not `eos_token_ids`, `max_new_tokens` or `row_key`."""
    words = [word.lower() for word in _WORD_BREAK.split(key) if word]
    if words[-1:] != ["token"]:
        words = [word for word in words if word != "token"]
    name = "_".join(words)
    return bool(_SECRET_WORDS & set(words)) or (_SECRET_KEY.search(name) is not None and name != "row_key")


def scrub_text(text: str) -> str:
    """`text` without the userinfo of the URIs in it, and without query strings and fragments that hold a credential."""
    return _URI.sub(_clean_uri, text)


def _clean_uri(match: re.Match[str]) -> str:
    query = match["query"] or ""
    return f"{match['scheme']}://{match['rest']}{'' if _holds_secret(query) else query}"


def _holds_secret(query: str) -> bool:
    """Whether a key, also of a URI inside, is like a credential's or a signature's, or a URI inside has userinfo."""
    plain = unquote(query)
    keys = [part.partition("=")[0] for part in re.split("[?#&;]", plain) if "=" in part]
    return any(_is_secret(key) or key.lower().startswith(_SIGNING_KEYS) for key in keys) or scrub_text(plain) != plain
