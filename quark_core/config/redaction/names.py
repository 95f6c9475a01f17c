"""Names that tell that a secret stands under them.

A name is read by its words: `dbPassword`, `DB_PASSWORD` and `db.password` are
the same two. The last word says what the value is, so `password_file` names a
file and `token_count` a count, and neither is a secret; `password_2`,
`secret_value` and `api_key_prod` are. What a name leaves open, the value
decides: `tokens` may be a number, words of a text, or what opens a door.
"""

from __future__ import annotations

import re
from enum import Enum
from functools import lru_cache
from itertools import pairwise

_LONGEST_NAME = 200
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")

_SECRET_WORDS = frozenset(
    """
    password passwords passwd passphrase passphrases passcode passcodes pwd pswd secret secrets
    credential credentials cred creds connstr psk
    """.split()
)
# Where words are written as one.
_SECRET_PARTS = re.compile(
    r"password(?!less)|passwd|passphrase|credential|(?:api|access|auth|secret|private|account)keys?$"
    r"|secrets?$|secretkey|pwd$|connectionstring"
)
_SECRET_PAIRS = frozenset(
    {
        ("access", "key"),
        ("account", "key"),
        ("api", "key"),
        ("auth", "key"),
        ("conn", "str"),
        ("connection", "string"),
        ("pass", "hash"),
        ("pass", "phrase"),
        ("pass", "word"),
        ("pw", "hash"),
        ("recovery", "code"),
        ("recovery", "phrase"),
        ("secret", "key"),
        ("seed", "phrase"),
        ("security", "answer"),
        ("shared", "key"),
        ("storage", "key"),
        ("subscription", "key"),
        ("user", "key"),
    }
)
# Keys that are often given as the path of a file.
_KEY_KINDS = frozenset(
    """
    admin app application cipher client consumer crypto decryption deploy encryption fernet gpg
    hmac jwt license master pgp private root rsa server service session signing ssh ssl tls
    webhook
    """.split()
)
_SERVICES = frozenset(
    """
    airtable algolia anthropic artifactory atlassian aws azure bitbucket claude clearml
    cloudflare cohere confluence cosmos cosmosdb dagshub databricks datadog deepseek
    digitalocean discord docker dockerhub dropbox elastic elasticsearch figma firebase gcp
    gemini gh ghcr git github gitlab google grafana groq heroku hf hub hugging huggingface
    jenkins jfrog jira kaggle kube kubernetes labelbox langfuse langsmith mailchimp mailgun
    minio mistral mlflow neptune netlify newrelic nexus ngc npm nvidia okta openai openrouter
    opsgenie pagerduty paypal perplexity pinecone pypi qdrant quark roboflow runpod salesforce
    sendgrid sentry serpapi serper sonar sonarqube shopify slack snowflake stripe supabase
    tavily telegram twilio vault vercel wandb weaviate xai zenodo
    """.split()
)
_ACCOUNTS = _SERVICES | frozenset(
    """
    account admin amqp api auth broker cert database db email ftp host http https imap key
    keystore ldap login mail maria mariadb mongo mongodb ms mssql my mysql oracle pg pop
    postgres postgresql proxy rabbit rabbitmq redis registry root server sftp site smtp sql ssh
    ssl store sudo tls truststore user usr vpn web wifi
    """.split()
)
# A word before "token" that makes it one of access.
_ACCESS_TOKENS = _SERVICES | frozenset(
    """
    access account admin api app auth authn authentication authorization bearer bot client csrf
    db deploy device id jwt login oauth personal push read refresh registry runner sas secret
    security service session sso upload webhook write xsrf
    """.split()
)
# A word before "token" that makes it one of text.
_TEXT_TOKENS = frozenset(
    """
    additional action answer assistant audio avg begin blank bos chat class cls completion
    concept cross decoder delimiter drop empty encoder end eod eos eot extra final fim first
    forced generated gist global ignore image img initializer input instance keep label lang
    language last latent mask masked max mean memory middle min modality new newline next noise
    num object output pad per placeholder positional prefix prompt query readout register rare
    reg response reward sep separator sentinel soft sos source space special speech src start
    state stop sub suffix suppress suppressed system target task text think timestamp tgt tool
    total train trigger unique unk unused valid video virtual vision visual vocab word
    """.split()
)
# What a value is that stands under such a last word is no secret, whatever it is about.
_INNOCENT_HEADS = frozenset(
    """
    arn attempts backend benchmark class column columns corpus count counts dataset datasets
    dir directory dirs duration embedding enabled encoder endpoint env environ expiration
    expires expiry field fields file filename filenames files folder format helper hint host
    kind len length lengths limit location loss manager max min model module name names number
    path paths pattern policy port position probability prob prompt provider ratio rate ref
    reference regex required rotation rule rules score size sizes source strategy task template
    timeout ttl type types uri url usage var variable version weight
    """.split()
)
# As frameworks call the cookie of a session; of many words `session_id` may be any session.
_SESSIONS = frozenset({"sessionid", "sessid", "phpsessid", "jsessionid"})
_SUFFIXES = frozenset(
    "dev live prod production staging str string test text val value values".split()
)
_ORDINARY_PASSES = frozenset(
    """
    all auto both backward backwards bad complete default eval fail failed false final first
    fixed forward full good last none ok off on one optional partial quick second single skip
    slow success test third train true two val validation warn yes no
    """.split()
)
_AUTH_KINDS = frozenset(
    """
    anonymous aws basic bearer cert certificate custom default digest disabled enabled false
    gcp google iam jwt kerberos key ldap managed mtls none ntlm oauth oauth2 off oidc optional
    password required saml service_account ssh ssl sso tls token true
    """.split()
)

_NUMBER = re.compile(r"[+-]?[0-9][0-9_,.]*(?:[eE][+-]?[0-9]+)?(?:[kKmMbBgGtT]|[a-z]{1,2}|%)?")
_SPECIAL = re.compile(r"[<\[{(].*[>\]})]", re.DOTALL)
_PLACE = re.compile(r"[/~]|\.{1,2}/|[A-Za-z]:[/\\]")
_FILE = re.compile(
    r"[^\s?&=]+\.(?:asc|cer|cfg|conf|crt|env|gpg|ini|jks|json|key|p12|pem|pfx|pub|py|toml|txt|ya?ml)"
)
_SCHEMED = re.compile(r"(?:bearer|basic|token|digest|apikey|negotiate)\s", re.IGNORECASE)
# A path of letters and digits alone that is as long as a key is one.
_BASE64 = re.compile(r"(?=.*[a-z])(?=.*[A-Z])(?=.*[0-9])[A-Za-z0-9+/]{32,}={0,2}")
_COUNTING = re.compile(r"(?:num|n|max|min|total|count|avg|number)(?:_of)?[_-]", re.IGNORECASE)
_RUNS = re.compile(r"[0-9]+|[A-Za-z]+")
_RAISED = re.compile(r"[a-z][A-Z]")
_RAISED_TOO_OFTEN = 3
_PLAIN_ARGUMENT = re.compile(r"[\d.,:/xX*+%-]+|[A-Za-z]+(?:[-_. ][A-Za-z]+)*|[a-z]{1,4}[0-9]{1,3}")


class Sense(Enum):
    """What a name says of its value.

    SECRET: Whatever it is, it is a secret, and so is all that lies below it.
    CREDENTIAL: A text is one.
    KEY: A text is one, unless it is the path of a file.
    TOKEN: A text is one, unless it looks like one of a language.
    TOKENS, AUTH, PASS: A text that looks it.
    """

    NONE = 0
    SECRET = 1
    CREDENTIAL = 2
    KEY = 3
    TOKEN = 4
    TOKENS = 5
    AUTH = 6
    PASS = 7


def is_secret_key(key: str, value: object) -> bool:
    """Whether a value under this key is a secret."""
    if value is None or isinstance(value, bool) or value == "":
        return False
    sense = read_name(key)
    if sense is Sense.NONE:
        return False
    if sense is Sense.SECRET:
        if isinstance(value, str):
            return not (_may_be_place(key) and _is_place(value))
        return _COUNTING.match(key) is None or not isinstance(value, (int, float))
    return isinstance(value, str) and _decide(sense, value)


@lru_cache(maxsize=8192)
def read_name(name: str) -> Sense:
    """What a name says of its value; of a very long one only the end is read."""
    words = [word.lower() for word in _WORDS.findall(name[-_LONGEST_NAME:])]
    numbered = False
    while words and words[-1].isdigit():
        words.pop()
        numbered = True
    if not words or words[-1] in _INNOCENT_HEADS:
        return Sense.NONE
    if _is_secret(words):
        return Sense.SECRET
    while len(words) > 1 and words[-1] in _SUFFIXES:
        words.pop()
        numbered = True
    return _read_last(words, numbered)


def looks_random(text: str) -> bool:
    """Whether letters and digits alternate in a text as they do in no word."""
    if any(character.isspace() for character in text):
        return False
    runs = _RUNS.findall(text)
    kinds = [run[0].isdigit() for run in runs]
    changes = sum(a != b for a, b in pairwise(kinds))
    return (changes >= 2 and len(text) >= 6) or (changes >= 1 and len(text) >= 12)


def is_short_password(text: str) -> bool:
    """Whether what follows `-p` is a password rather than a port, a path, a name or a sentence."""
    if not text or _SPECIAL.fullmatch(text):
        return False
    if _PLAIN_ARGUMENT.fullmatch(text) and len(_RAISED.findall(text)) < _RAISED_TOO_OFTEN:
        return False
    return not (any(map(str.isspace, text)) or _is_place(text) or "://" in text)


def _is_secret(words: list[str]) -> bool:
    if not _SECRET_WORDS.isdisjoint(words):
        return True
    if any((a, b.removesuffix("s")) in _SECRET_PAIRS for a, b in pairwise(words)):
        return True
    if any(_SECRET_PARTS.search(word) for word in words):
        return True
    last = words[-1]
    if last in ("pass", "pw") and len(words) > 1:
        return words[-2] in _ACCOUNTS
    return any(last.endswith(end) and last[: -len(end)] in _ACCOUNTS for end in ("pass", "pw"))


def _read_last(words: list[str], numbered: bool) -> Sense:
    if words[-2:] == ["key", "data"]:
        words = words[:-1]  # `client-key-data` of a kubeconfig
    last, before = words[-1], words[:-1]
    singular = last.removesuffix("s")
    if singular == "key":
        known = not _SERVICES.isdisjoint(before[-2:]) or (before and before[-1] in _KEY_KINDS)
        return Sense.KEY if known else Sense.NONE
    if singular.endswith("key") and singular[:-3] in _SERVICES:
        return Sense.KEY
    if singular == "token":
        return _read_token(before, open_ended=last != "token" or (numbered and not before))
    if singular.endswith("token") and singular[:-5] not in _TEXT_TOKENS:
        return Sense.CREDENTIAL if singular[:-5] in _ACCESS_TOKENS else Sense.TOKENS
    if "token" in words:
        place = words.index("token")
        named = words[place + 1 :]
        return Sense.CREDENTIAL if named and set(named) <= _SERVICES else Sense.NONE
    if (
        singular == "cookie"
        or last in _SESSIONS
        or last in (*("setcookie", "bearer", "jwt", "authorization", "sas", "csrf", "xsrf"),)
    ):
        return Sense.CREDENTIAL
    if last == "pat":
        return Sense.CREDENTIAL if not _SERVICES.isdisjoint(before) else Sense.NONE
    if last == "auth":
        return Sense.AUTH
    if last in ("pass", "pw") and not numbered:
        return Sense.PASS if not before or last == "pw" else Sense.NONE
    return Sense.NONE


def _read_token(before: list[str], *, open_ended: bool) -> Sense:
    if before and before[-1] in _TEXT_TOKENS:
        return Sense.NONE
    if not _ACCESS_TOKENS.isdisjoint(before):
        return Sense.CREDENTIAL
    if not _TEXT_TOKENS.isdisjoint(before):
        return Sense.NONE
    return Sense.TOKENS if open_ended else Sense.TOKEN


def _decide(sense: Sense, text: str) -> bool:
    """Whether a text under a name of this sense is a secret."""
    if _SCHEMED.match(text):
        return True
    if _NUMBER.fullmatch(text):
        return False
    if sense is Sense.CREDENTIAL:
        return _SPECIAL.fullmatch(text) is None or text.startswith("{")
    if sense is Sense.KEY:
        return not any(map(str.isspace, text)) and not _is_place(text)
    if sense is Sense.TOKEN:
        return _SPECIAL.fullmatch(text) is None and not any(map(str.isspace, text))
    if sense is Sense.TOKENS:
        return looks_random(text)
    if sense is Sense.AUTH:
        return text.lower() not in _AUTH_KINDS and "://" not in text
    return text.lower() not in _ORDINARY_PASSES and not any(map(str.isspace, text))


def _is_place(text: str) -> bool:
    """Whether a text is a path; base64 may begin with a slash, too."""
    if _FILE.fullmatch(text) is not None:
        return True
    return _PLACE.match(text) is not None and _BASE64.fullmatch(text) is None


def _may_be_place(key: str) -> bool:
    """Whether a secret's name is as often that of a folder or a file: PWD, …_CREDENTIALS."""
    name = key.lower().strip("$-_")
    return name in ("pwd", "oldpwd") or name.endswith(("credentials", "credential", "creds"))
