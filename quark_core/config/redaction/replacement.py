"""Takes secrets out of texts, JSON values and records."""

from __future__ import annotations

import binascii
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

import msgspec

from quark_core.config.redaction.detection import (
    REDACTED,
    Sense,
    is_secret_key,
    is_short_password,
    looks_random,
    read_name,
    redact_shapes,
)
from quark_core.records import RECORD_TYPES, LifecycleRecord
from quark_core.records.base import Record, StreamRecord
from quark_core.records.json_object import JsonObject, clean_text
from quark_core.records.schema import column_types

# From here on it is a password where a scheme and `user:` are before it. A host and its port are
# none, and what comes after them is a path, in which an `@` is no border.
_USER_INFO = re.compile(
    r"""
    (?<=://)
    (?: (?P<user>[^\s/?\#@:"'<>]*) (?P<password>:(?![0-9]{1,5}[/?\#])(?:(?!://)[^\s"'<>])*)?
      | (?P<odd>[^\s/?\#@:"'<>]*:[0-9]{1,5}[/?\#](?:(?!://)[^\s"'<>])*)
    )@(?=[\w\[.-])
    """,
    re.VERBOSE,
)
# Where no path has an `@` in it, a password may well begin like a port.
_DATABASES = re.compile(
    r"(?:postgres|mysql|maria|mongo|redis|rediss|amqp|mssql|oracle|clickhouse|cockroach|snowflake|"
    r"ldap|ldaps|ftp|ftps|sftp|smtp|smtps)[a-z0-9+]{0,20}$",
    re.IGNORECASE,
)
# Where a name without a password is an account or a container rather than a token.
_WEB = re.compile(r"https?$", re.IGNORECASE)
_ORDINARY_USERS = frozenset({"git", "anonymous", "user", REDACTED})
_LONGEST_SCHEME = 32
_PARAMETER = re.compile(r"(?P<name>(?:[?&;]|(?<!\S))([A-Za-z_-]{1,64})=)(?P<value>[^\s&;#\"'<>]+)")
_SIGNING_ALONE = frozenset(
    """
    sig x-amz-signature x-amz-credential x-goog-signature x-goog-credential awsaccesskeyid
    """.split()
)
_SIGNING = _SIGNING_ALONE | {"signature", "key-pair-id", "client_assertion", "code_verifier"}

# What is in every name that tells of a secret: most texts have none of it.
_STEMS = (
    *(
        "pass",
        "token",
        "key",
        "secret",
        "auth",
        "pw",
        "cred",
        "cookie",
        "pat",
        "conn",
        "bearer",
        "jwt",
    ),
    *("sas", "psk", "pswd", "phrase", "recovery", "answer", "csrf", "xsrf", "sessid", "sessionid"),
)
_SHORTEST_TEXT = 4
_MOST_PASSES = 5
# Longer than any secret that a cut could go through.
_CUT_MARGIN = 8 * 1024

# So much of a program's literals is looked at first, and none that is shorter is a secret.
_LITERAL = re.compile(
    r"(?:pass|token|key|secret|auth|pw|cred|pswd)[\w.-]{0,20}[\"']?\]?[ \t]{0,8}[:=][ \t]{0,8}"
    r"[bfru]?[\"'][^\s\"']{8}"
)
_SHORTEST_LITERAL = 8

# A name, and what stands between it and its value. Possessive, so that no text is read twice.
_ASSIGNED = re.compile(
    r"(?<![\w.-])(?P<name>[\w.-]++)"
    r"(?P<gap>\\*+[\"'`]?\]?(?:[ \t]++is)?[ \t]*+(?:=>|:=|==?|:)[ \t]*+)"
)
_OPTION = re.compile(r"(?<![\w-])(?P<name>--?[A-Za-z][\w.-]*+)(?P<gap>[ \t]++)(?=[^\s-]|-[^\s-]\S)")
# A cell of a table, and the next one.
_CELL = re.compile(
    r"(?<![\w.-])(?P<name>[\w.-]++)(?P<gap>[ \t]*+[|│┃][ \t]*+|\t[ \t]*+|[ ]{2,}+)(?=[^\s|│┃])"
)
# A value of YAML on the lines below its name, and one that is printed on the next line.
_BLOCK = re.compile(r"[>|][+-]?[1-9]?[+-]?[ \t]*+\r?\n(?P<indent>[ \t]++)(?=\S)")
_BELOW = re.compile(r"[ \t]*+\r?\n[ \t]*+(?P<value>[^\s:=]++)[ \t]*+(?=\r|\n|$)")
_AFTER = re.compile(r"(?<![\w.-])(?P<name>[\w.-]++)(?P<gap>[ \t]++)(?=[\"'\w])")
_IDENTIFIED = re.compile(r"\bidentified[ \t]++by[ \t]++'(?P<value>[^'\n]*+)", re.IGNORECASE)
_ELEMENT = re.compile(r"<(?P<name>[\w:.-]{1,100})(?:\s[^<>]{0,200})?(?P<gap>>)(?=[^<\s])")
_NETRC = re.compile(r"\blogin[ \t]++\S++\s++password[ \t]++(?P<value>\S++)")
_LOGIN = re.compile(
    r"\blogin[ \t]++(?:--\S++[ \t]++){0,4}+(?P<value>(?=\D{0,64}\d)\w{16,}+)(?![\w.@:-])"
)
_CURL_USER = re.compile(
    r"(?<!\S)(?:-u|--(?:proxy-)?user)[ \t=]++[\"']?[^\s:/=\"']{1,100}:(?P<value>[^\s\"']++)"
)
_SHORT_OPTION = re.compile(r"(?<!\S)-p(?P<gap>[ \t]*+)(?P<value>[^\s-]\S*+)")
_SCHEME = re.compile(
    r"(?<!\w)(?P<scheme>Bearer|Basic)[ \t]++(?P<value>[\w.~+/=-]{8,}+)", re.IGNORECASE
)

_HEADER = re.compile(r"[^\r\n\"']*")
_BARE = re.compile(r"[^\s;&,]*+(?:(?![;&,] ?[\w.-]{1,64} ?[=:])[;&,][^\s;&,]*+)*+")
_ENDS = "\"'`,)]}>.;"
# Words that are a name together with the one before them: `API key: …`, `access token=…`.
_SECOND_WORDS = frozenset({"code", "codes", "key", "keys", "phrase", "string", "token", "tokens"})
_WORD_BEFORE = re.compile(r"([A-Za-z]{2,20})[ ]$")
_HEADERS = frozenset({"authorization", "proxy-authorization", "cookie", "set-cookie"})
_MOST_ESCAPES = 8
# So much of a value shows what it is.
_DECISIVE_LENGTH = 64
_NOTHING = frozenset({"none", "null", "true", "false", "nil", "undefined", "na", "n/a"})


def redact_text(text: str) -> str:
    """Replace tokens of known shapes, secrets of URLs, and what a name before it gives away."""
    if len(text) < _SHORTEST_TEXT:
        return text
    # A token that stood against a name may have hidden it.
    for _ in range(_MOST_PASSES):
        redacted = _redact_once(text)
        if redacted == text:
            break
        text = redacted
    return text


def redact_code(text: str) -> str:
    """Replace in the text of a program tokens of known shapes, and literals under sure names.

    `password = "x7-horse"` and the password of a URL go; `token = next(tokens)` is code and stays.
    """
    text = redact_shapes(text)
    if "://" in text:
        text = _USER_INFO.sub(_hide_user_info, text)
    # Most programs have no literal under such a name, and are read no further.
    lowered = text.lower()
    if not any(map(lowered.__contains__, _STEMS)) or _LITERAL.search(lowered) is None:
        return text
    return _redact_named(text, _ASSIGNED, _is_literal)


def _redact_once(text: str) -> str:
    if "://" in text:
        text = _USER_INFO.sub(_hide_user_info, text)
    if "=" in text:
        text = _PARAMETER.sub(_hide_parameter, text)
    lowered = text.lower()
    if any(map(lowered.__contains__, _STEMS)):
        text = _redact_names(text)
    if "-u" in text:
        text = _CURL_USER.sub(_hide_curl_password, text)
    if "-p" in text:
        text = _SHORT_OPTION.sub(_hide_short_password, text)
    if "identified" in lowered:
        text = _IDENTIFIED.sub(_hide_value, text)
    if "login" in lowered:
        text = _LOGIN.sub(_hide_value, _NETRC.sub(_hide_value, text))
    if "bearer" in lowered or "basic" in lowered:
        text = _SCHEME.sub(_hide_scheme, text)
    return redact_shapes(text)


def cut_text(text: str, characters: int) -> str:
    """The beginning of a text, redacted first: a token that is cut has lost its shape."""
    return redact_text(text[: characters + _CUT_MARGIN])[:characters]


def _redact_names(text: str) -> str:
    """Replace what stands behind a name that tells of it."""
    if "=" in text or ":" in text:
        text = _redact_named(text, _ASSIGNED, _is_assigned)
    if any(sign in text for sign in ("|", "│", "┃", "\t", "  ")):
        text = _redact_named(text, _CELL, _is_cell)
    if "-" in text:
        text = _redact_named(text, _OPTION, _is_option_value)
    if " " in text:
        text = _redact_named(text, _AFTER, _is_after_password)
    if "</" in text:
        text = _redact_named(text, _ELEMENT, _is_element)
    return text


def _hide_user_info(found: re.Match[str]) -> str:
    begin = found.start()
    scheme = found.string[max(0, begin - 3 - _LONGEST_SCHEME) : begin - 3]
    if found["odd"] is not None:
        return f"{REDACTED}@" if _DATABASES.search(scheme) else found[0]
    if found["password"] is None:
        stays = found["user"] in _ORDINARY_USERS or _WEB.search(scheme) is None
        return found[0] if stays else f"{REDACTED}@"
    return f"{REDACTED}@"


def _hide_parameter(found: re.Match[str]) -> str:
    name = found[2]
    # Outside of a URL a `signature` is many a thing; one of a known kind is not.
    if found[0][0] in "?&;":
        is_secret = name.lower() in _SIGNING or is_secret_key(name, found["value"])
    else:
        is_secret = name.lower() in _SIGNING_ALONE
    return found["name"] + REDACTED if is_secret else found[0]


def _hide_value(found: re.Match[str]) -> str:
    return found.string[found.start() : found.start("value")] + REDACTED


def _hide_curl_password(found: re.Match[str]) -> str:
    return found[0] if found["value"].isdigit() else _hide_value(found)


def _hide_short_password(found: re.Match[str]) -> str:
    value = found["value"].rstrip(_ENDS)
    is_login = " -u" in found.string or "--user" in found.string or "mysql" in found.string
    if found["gap"]:
        is_secret = is_short_password(value) or (is_login and not value.isdigit())
    else:
        is_secret = is_login and len(value) >= _SHORTEST_TEXT and not value.isdigit()
    return _hide_value(found) if is_secret else found[0]


def _hide_scheme(found: re.Match[str]) -> str:
    value = found["value"]
    if found["scheme"].lower() == "basic":
        is_secret = _is_basic(value)
    else:
        is_secret = len(value) >= 32 or any(map(str.isdigit, value))
    return _hide_value(found) if is_secret else found[0]


def _is_basic(value: str) -> bool:
    """Whether this is `user:password` in base64, rather than a word after "basic"."""
    try:
        plain = binascii.a2b_base64(value[:4096] + "=" * (-len(value[:4096]) % 4))
    except (binascii.Error, ValueError):
        return False
    return b":" in plain


def _redact_named(
    text: str, pattern: re.Pattern[str], is_secret: Callable[[re.Match[str], str], bool]
) -> str:
    """Replace the values of those names in a text that tell of a secret."""
    parts: list[str] = []
    done = 0
    position = 0
    while (found := pattern.search(text, position)) is not None:
        position = found.end()
        if _read_name(found) is Sense.NONE:
            continue
        # Names may stand in each other's values: what is no secret is not read to its end.
        begin, end = _find_value(text, found, found.end() + _DECISIVE_LENGTH)
        value = text[begin:end]
        if value and not _is_done(text, begin) and is_secret(found, value):
            begin, end = _find_value(text, found, len(text))
            parts += text[done:begin], REDACTED
            done = position = end
    return text if not parts else "".join((*parts, text[done:]))


def _full_name(found: re.Match[str]) -> str:
    """The name, with the word before it where only both together are one."""
    name = found["name"]
    if name.lower() in _SECOND_WORDS:
        begin = found.start("name")
        before = _WORD_BEFORE.search(found.string[max(0, begin - 21) : begin])
        if before is not None:
            return f"{before[1]}_{name}"
    return name


def _read_name(found: re.Match[str]) -> Sense:
    return read_name(_full_name(found))


def _is_done(text: str, begin: int) -> bool:
    """Whether what stands here is what a redaction left."""
    end = begin + len(REDACTED)
    return text.startswith(REDACTED, begin) and not text[end : end + 1].isalnum()


def _is_assigned(found: re.Match[str], value: str) -> bool:
    name, gap = _full_name(found), found["gap"]
    if value.lower() in _NOTHING:
        return False
    if not is_secret_key(name, value):
        return False
    sense = read_name(name)
    if sense is Sense.SECRET or name.lower() in _HEADERS or gap[0] in "\"'`\\":
        return True
    if found.string[found.end() : found.end() + 1] in ("'", '"') or gap == "=":
        return True
    # `token: expected`, `token = get()`: prose and code have these names, too.
    return looks_random(value) and "(" not in value


def _is_literal(found: re.Match[str], value: str) -> bool:
    if _read_name(found) is not Sense.SECRET or len(value) < _SHORTEST_LITERAL:
        return False
    is_quoted = found.string[found.end() : found.end() + 2].lstrip("bfru")[:1] in ("'", '"')
    is_word = value.isidentifier() or any(map(str.isspace, value)) or "{" in value
    return is_quoted and not is_word and is_secret_key(_full_name(found), value)


def _is_option_value(found: re.Match[str], value: str) -> bool:
    return is_secret_key(found["name"], value)


def _is_cell(found: re.Match[str], value: str) -> bool:
    # `password | str | the user's` says what a password is, and is none.
    if not any(map(str.isdigit, value)):
        return False
    sure = _read_name(found) is Sense.SECRET and not found["gap"].isspace()
    return is_secret_key(found["name"], value) and (sure or looks_random(value))


def _is_after_password(found: re.Match[str], value: str) -> bool:
    if _read_name(found) is not Sense.SECRET or value.isspace():
        return False
    return found.string[found.end()] in "\"'" or (looks_random(value) and "://" not in value)


def _is_element(found: re.Match[str], value: str) -> bool:
    return is_secret_key(found["name"], value)


def _find_value(text: str, found: re.Match[str], stop: int) -> tuple[int, int]:
    """Where the value begins and ends that a name stands before, at `stop` at the latest."""
    begin = found.end()
    if found["gap"] == ">":
        end = text.find("<", begin, stop)
        return begin, min(stop, len(text)) if end < 0 else end
    # Escapes of JSON inside of JSON, and the letter before a quote of Python.
    quote_at = begin
    while quote_at - begin < _MOST_ESCAPES and text[quote_at : quote_at + 1] == "\\":
        quote_at += 1
    if quote_at == begin and text[begin : begin + 1] in ("b", "f", "r", "u"):
        quote_at += 1
    if text[quote_at : quote_at + 1] in ("'", '"', "`"):
        return _find_quoted(text, begin, quote_at, stop)
    if found["gap"].rstrip().endswith(":"):
        block = _BLOCK.match(text, begin)
        if block is not None:
            return _find_block(text, block, stop)
        below = _BELOW.match(text, begin)
        if below is not None:
            return below.start("value"), min(stop, below.end("value"))
    pattern = _HEADER if found["name"].lower() in _HEADERS else _BARE
    value = pattern.match(text, begin, stop)
    if value is None:
        return begin, begin
    end = value.end()
    while end > begin and text[end - 1] in _ENDS:
        end -= 1
    return begin, end


def _find_block(text: str, block: re.Match[str], stop: int) -> tuple[int, int]:
    """The lines of a value that are all as far to the right as its first one."""
    end = place = block.end()
    while place < stop:
        line_end = text.find("\n", place, stop)
        end = place = stop if line_end < 0 else line_end
        if not text.startswith(block["indent"], place + 1):
            break
        place += 1
    return block.end(), max(block.end(), min(stop, end))


def _find_quoted(text: str, begin: int, quote_at: int, stop: int) -> tuple[int, int]:
    """What stands in quotes; up to the end of the line, where nothing closes them."""
    quote = text[quote_at]
    opening = quote * 3 if text.startswith(quote * 3, quote_at) else text[begin : quote_at + 1]
    opening = opening.lstrip("bfru")
    inside = quote_at + len(opening.lstrip("\\"))
    end = inside
    while (end := text.find(opening, end, stop)) >= 0:
        if opening[0] == "\\" or text[end - 1] != "\\":
            return inside, end
        end += 1
    line_end = text.find("\n", inside, stop)
    return inside, min(stop, len(text)) if line_end < 0 else line_end


_Object = TypeVar("_Object", JsonObject, None, JsonObject | None)

# Under what names a list of names and values has them.
_NAME_KEYS = ("name", "key", "variable", "header", "option")
_VALUE_KEYS = ("value", "val", "default")
# What says something only together with what it stands under, or what stands under it.
_HEADS = ("key", "keys", "token", "tokens", "pass", "pw", "auth", "cookie", "cookies")
# No key that is shorter holds a secret with a shape.
_SHORTEST_SHAPE = 15


def redact_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Copy JSON values with the secrets replaced by `REDACTED`, at any depth."""
    return _redact_mapping("", values)


def redact_object(value: _Object) -> _Object:
    """The same object where nothing in it is secret, else a redacted copy."""
    if not value:
        return value
    redacted = _redact_mapping("", value)
    return value if redacted == value else JsonObject(redacted)


def _redact_mapping(parent: str, values: Mapping[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    named = _find_name(values)
    for key, item in values.items():
        known = key if key not in _VALUE_KEYS or not named else named
        if is_secret_key(known, item) or _is_secret_together(parent, key, item):
            item = REDACTED
        else:
            item = _redact(key, item)
        shown = key if len(key) < _SHORTEST_SHAPE else redact_shapes(key)
        while shown != key and shown in out:
            shown += "'"
        out[shown] = item
    return out


def _redact(key: str, value: Any) -> Any:
    if isinstance(value, str):
        return redact_text(value)
    if isinstance(value, JsonObject) and value.is_redacted:
        return value
    if isinstance(value, Mapping):
        return _redact_mapping(key, value)
    if isinstance(value, list):
        return _redact_list(key, value)
    return value


def _redact_list(key: str, values: list[Any]) -> list[Any]:
    if not values:
        return []
    if not all(isinstance(item, str) for item in values):
        return [REDACTED if is_secret_key(key, item) else _redact(key, item) for item in values]
    if read_name(key) is Sense.AUTH and len(values) == 2:
        return [REDACTED, REDACTED]
    if len(values) == 2 and is_secret_key(values[0], values[1]) and " " not in values[0]:
        return [values[0], REDACTED]
    if any(item.startswith("-") for item in values):
        return redact_arguments(values)
    return [REDACTED if is_secret_key(key, item) else redact_text(item) for item in values]


def _is_secret_together(parent: str, key: str, item: Any) -> bool:
    """Whether two names say together what neither does alone: `wandb` and `key`, `tokens`, `hf`."""
    if not parent:
        return False
    if key.lower() in _HEADS:
        return is_secret_key(f"{parent}_{key}", item)
    return parent.lower() in _HEADS and is_secret_key(f"{key}_{parent}", item)


def _find_name(values: Mapping[str, Any]) -> str:
    """What a mapping such as {"name": "DB_PASSWORD", "value": …} names, or nothing."""
    if len(values) > 8:
        return ""
    for key in _NAME_KEYS:
        name = values.get(key)
        if isinstance(name, str):
            return name
    return ""


_OPTION_NAME = re.compile(r"--?[A-Za-z][\w.-]*")
# `--use-password` and its like say whether, not what.
_SWITCH = re.compile(
    r"-+(?:use|no|with|without|has|is|ask|enable|disable|require|skip|show|hide|prompt|check|save|"
    r"allow|list|print|read)[_-]",
    re.IGNORECASE,
)
_USER_OPTIONS = re.compile(r"-[uU]\S*|--?(?:user|username|login|host)(?:=.*)?", re.DOTALL)
_USER_AND_PASSWORD = re.compile(r"(?P<user>[^\s:/=]+:)(?![/\d]+$)\S+")
_ATTACHED = re.compile(r"-p(?=[^\d\s=/.]*\d)(?![a-z]+\d{0,3}$)\S{4,}")


def redact_arguments(arguments: Iterable[str]) -> list[str]:
    """Redact a command line.

    `--password x`, `--password=x`, `password=x`, `-p x`, `-u name:x`, and
    whatever `redact_text` finds in an argument. The list stays as long as it is.
    """
    given = list(arguments)
    out: list[str] = []
    waiting = _Waiting()
    has_user = any(_USER_OPTIONS.fullmatch(argument) for argument in given)
    for argument in given:
        if waiting.takes(argument):
            out.append(REDACTED)
            continue
        waiting = _Waiting(argument)
        out.append(_redact_one(argument, out, given, has_user))
    return out


class _Waiting:
    """Whether the next argument is the secret that an option asks for.

    Args:
        option: The argument before it.
    """

    def __init__(self, option: str = "") -> None:
        is_option = _OPTION_NAME.fullmatch(option) is not None and _SWITCH.match(option) is None
        self._name = option if is_option and len(option) > 2 else ""
        self._sense = read_name(self._name) if self._name else Sense.NONE
        # `--api-keys a b c`
        self._several = self._name.endswith("s")

    def takes(self, argument: str) -> bool:
        """Whether it takes an argument; one that takes a single one takes no more."""
        if self._sense is Sense.NONE or not argument:
            return False
        if argument.startswith("--"):
            taken = _OPTION_NAME.fullmatch(argument.partition("=")[0]) is None
        elif argument.startswith("-"):
            taken = len(argument) > 2 or not argument[1:].isalpha()
        else:
            taken = is_secret_key(self._name, argument)
        if not taken or not self._several:
            self._sense = Sense.NONE
        return taken


def _redact_one(argument: str, before: Sequence[str], given: Sequence[str], has_user: bool) -> str:
    name, equals, value = argument.partition("=")
    if equals and is_secret_key(name, value):
        return f"{name}={REDACTED}"
    option = given[len(before) - 1] if before else ""
    if option in ("-p", "-P") and not _OPTION_NAME.fullmatch(argument):
        plain = argument.isdigit() or (not has_user and not is_short_password(argument))
        return redact_text(argument) if plain else REDACTED
    if option in ("-u", "--user"):
        both = _USER_AND_PASSWORD.fullmatch(argument)
        if both is not None:
            return f"{both['user']}{REDACTED}"
    if has_user and _ATTACHED.fullmatch(argument):
        return f"-p{REDACTED}"
    return redact_text(argument)


_Record = TypeVar("_Record", bound=StreamRecord)

# No secret with a shape is shorter, and a batch has thousands of ids.
_SHORTEST_ITEM = 12
# Where the start of a run says in what folders it lies: they must stay what they are called.
_PLACES = (("project", "root_path"), ("run", "run_path"), ("store", "path"))


@cache
def _list_written(kind: str) -> tuple[str, ...]:
    """The fields that hold what people write.

    What names something, is one of a few words, or is plain by its type's rules, is not among
    them: values are found again by it.
    """
    rules = RECORD_TYPES[kind].RULES
    left_out = {*rules.names, *rules.words, *rules.plain}
    fields = column_types(kind).items()
    return tuple(name for name, encoding in fields if encoding in "tj" and name not in left_out)


def redact_record(record: _Record) -> _Record:
    """The same record where nothing in it is secret, else a redacted copy."""
    changes: dict[str, Any] = {}
    if isinstance(record, LifecycleRecord) and record.data:
        changes["data"] = _redact_data(record.action, record.data)
    for name in _list_written(record.KIND):
        value = getattr(record, name)
        if value:
            is_labelled = name in record.RULES.labelled
            changes[name] = _redact_labels(value) if is_labelled else _redact_field(value)
    if all(getattr(record, name) is value for name, value in changes.items()):
        return record
    return msgspec.structs.replace(record, **changes)


def _redact_data(action: str, data: JsonObject) -> JsonObject:
    redacted = redact_values(data)
    if action == "start":
        for part, name in _PLACES:
            given = data.get(part)
            if isinstance(given, dict) and name in given:
                redacted[part][name] = given[name]
    return data if redacted == data else JsonObject(redacted)


def _redact_field(value: Any) -> Any:
    if isinstance(value, str):
        # Whoever keeps it, the black box first, encodes it, and one text must not cost others.
        redacted = clean_text(redact_text(value))
        return value if redacted == value else redacted
    if isinstance(value, JsonObject):
        return redact_object(value)
    # Ids of samples are numbers mostly.
    if isinstance(value, tuple) and set(map(type, value)) != {int}:
        items = tuple(_redact_item(item) for item in value)
        return value if items == value else items
    return value


def _redact_labels(counts: JsonObject) -> JsonObject:
    """What is counted may be called `password`, and is no secret for it."""
    labels = {redact_shapes(label): count for label, count in counts.items()}
    return counts if labels == counts else JsonObject(labels)


def _redact_item(item: Any) -> Any:
    if isinstance(item, str):
        return clean_text(item if len(item) < _SHORTEST_ITEM else redact_text(item))
    if isinstance(item, Record):
        texts = {
            name: clean_text(redact_text(text))
            for name in item.__struct_fields__
            if isinstance(text := getattr(item, name), str)
        }
        return msgspec.structs.replace(item, **texts)
    return item
