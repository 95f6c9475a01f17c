"""Detection of secrets, by their names or their shapes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import Enum
from functools import cache, lru_cache
from itertools import pairwise

# Names that tell that a secret stands under them.
#
# A name is read by its words: `dbPassword`, `DB_PASSWORD` and `db.password` are
# the same two. The last word says what the value is, so `password_file` names a
# file and `token_count` a count, and neither is a secret; `password_2`,
# `secret_value` and `api_key_prod` are. What a name leaves open, the value
# decides: `tokens` may be a number, words of a text, or what opens a door.

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


# Secrets that are known by their shape, wherever they stand.
#
# The shapes are facts that their issuers document, gathered from the rules of
# gitleaks (MIT) and the plugins of detect-secrets (Apache-2.0), and from the
# issuers where those lag; docs/contributing/decisions/0020-find-secrets-by-shape-and-name.md says
# why neither is a dependency. Lengths are the least that is plausible, so that
# a token which was cut, or has grown since, is seen too.

REDACTED = "[redacted]"
"""The text that replaces a secret."""

# A body with a digit, where words of a sentence could follow the prefix too. What is only
# looked at is bounded: prefixes may follow each other a million times.
_MIXED = r"(?=[\w-]{0,64}\d)[\w-]"

# Prefix -> what follows it. A prefix begins where no letter or digit is before it.
_PREFIXED: dict[str, str] = {
    # Models and training
    # OpenAI, Anthropic, OpenRouter, Langfuse; without a second prefix also DeepSeek
    "sk-": r"(?:(?:proj|svcacct|admin|None|ant|or|lf)-" + _MIXED + r"{16,}"
    r"|(?=[A-Za-z]{0,64}\d)[A-Za-z0-9]{16,}[\w-]*)",
    "sk_": r"(?:live|test|prod)_[A-Za-z0-9]{10,}",  # Stripe
    "rk_": r"(?:live|test|prod)_[A-Za-z0-9]{10,}",  # Stripe
    "hf_": r"(?:oauth_|jwt_)?[A-Za-z0-9]{20,}",  # Hugging Face
    "api_org_": r"[A-Za-z0-9]{20,}",  # Hugging Face
    "wandb_v1_": r"[A-Za-z0-9_-]{16,}",  # Weights & Biases
    "gsk_": r"[A-Za-z0-9]{20,}",  # Groq
    "r8_": r"[A-Za-z0-9]{20,}",  # Replicate
    "tgp_v1_": r"[\w-]{20,}",  # Together
    "fw_": r"(?=[A-Za-z]{0,64}\d)[A-Za-z0-9]{20,}",  # Fireworks
    "esecret_": r"[A-Za-z0-9]{16,}",  # Anyscale
    "csk-": r"(?=[a-z]{0,64}\d)[a-z0-9]{32,}",  # Cerebras
    "jina_": r"(?=[A-Za-z_-]{0,64}\d)[\w-]{32,}",  # Jina
    "e2b_": r"[0-9a-f]{32,}",  # E2B
    "pplx-": r"[A-Za-z0-9]{20,}",  # Perplexity
    "xai-": _MIXED + r"{20,}",  # xAI
    "nvapi-": r"[\w-]{20,}",  # NVIDIA
    "pcsk_": r"[A-Za-z0-9_]{20,}",  # Pinecone
    "lsv2_": r"(?:pt|sk)_[A-Za-z0-9_]{20,}",  # LangSmith
    "tvly-": _MIXED + r"{16,}",  # Tavily
    "rpa_": r"[A-Za-z0-9]{20,}",  # RunPod
    "KGAT_": r"[A-Za-z0-9]{20,}",  # Kaggle
    "eyJhcGlfYWRkcmVzcyI6": r"[A-Za-z0-9_=-]+",  # Neptune
    "qk_": r"[A-Za-z0-9]+_" + _MIXED + r"{16,}",  # Quark
    # Code and packages
    **dict.fromkeys(("ghp_", "gho_", "ghu_", "ghs_", "ghr_"), r"[A-Za-z0-9]{20,}"),  # GitHub
    "github_pat_": r"\w{20,}",  # GitHub
    **dict.fromkeys(  # GitLab
        (
            *("glpat-", "gldt-", "glft-", "glrt-", "glcbt-", "glptt-", "glimt-", "gloas-"),
            *("glsoat-", "glagent-", "glffct-"),
        ),
        r"[\w.-]{16,}",
    ),
    "GR1348941": r"[\w-]{16,}",  # GitLab
    "ATBB": r"[A-Za-z0-9]{24,}",  # Bitbucket
    "ATATT3": r"[\w=-]{20,}",  # Atlassian
    "ATCTT3": r"[\w=-]{20,}",  # Atlassian
    "npm_": r"[A-Za-z0-9]{30,}",
    "pypi-Ag": r"[\w-]{20,}",
    "rubygems_": r"[0-9a-f]{32,}",
    "dckr_pat_": r"[\w-]{20,}",  # Docker
    "AKCp": r"[A-Za-z0-9]{60,}",  # Artifactory
    "oy2": r"[a-z0-9]{43}\b",  # NuGet
    "sgp_": r"(?:local_|[0-9a-f]{16}_)?[0-9a-f]{40}",  # Sourcegraph
    "figd_": r"[\w-]{20,}",  # Figma
    "lin_api_": r"[A-Za-z0-9]{20,}",  # Linear
    "ntn_": r"(?=[A-Za-z]{0,64}\d)[A-Za-z0-9]{20,}",  # Notion
    "secret_": r"(?=[A-Za-z]*[0-9])[A-Za-z0-9]{40,}",  # Notion, until 2024
    "PMAK-": r"[0-9a-f]{20,}-[0-9a-f]{20,}",  # Postman
    "CCIPAT_": r"(?=[A-Za-z_]{0,64}\d)\w{20,}",  # CircleCI
    "pnu_": r"[A-Za-z0-9]{30,}",  # Prefect
    "pul-": r"[0-9a-f]{40}",  # Pulumi
    # Clouds
    **dict.fromkeys(("AKIA", "ASIA", "ABIA", "ACCA"), r"[0-9A-Z]{16}(?![A-Za-z0-9])"),  # AWS
    "ABSK": r"[A-Za-z0-9+/]{60,}={0,2}",  # AWS Bedrock
    "bedrock-api-key-": r"[A-Za-z0-9+/=_-]{20,}",  # AWS Bedrock
    "AIza": r"[\w-]{30,}",  # Google
    "ya29.": r"[\w-]{20,}",  # Google
    "GOCSPX-": r"[\w-]{20,}",  # Google
    "1//0": r"[\w-]{30,}",  # Google
    "LTAI": r"[A-Za-z0-9]{16,24}(?![\w-])",  # Alibaba
    "AKID": r"[A-Za-z0-9]{32}(?![\w-])",  # Tencent
    "dapi": r"[0-9a-f]{32}(?:-\d)?",  # Databricks
    "dose": r"[0-9a-f]{32}(?:-\d)?(?![\w-])",  # Databricks
    **dict.fromkeys(("dop_v1_", "doo_v1_", "dor_v1_"), r"[0-9a-f]{32,}"),  # DigitalOcean
    "HRKU-": r"[\w-]{30,}",  # Heroku
    "v1.0-": r"[0-9a-f]{24}-[0-9a-f]{100,}",  # Cloudflare
    **dict.fromkeys(("fo1_", "fm1a_", "fm1r_", "fm2_"), r"[\w+/=-]{40,}"),  # Fly.io
    "sbp_": r"[0-9a-f]{40}",  # Supabase
    "sb_secret_": r"[\w-]{20,}",  # Supabase
    "tskey-": _MIXED + r"{16,}",  # Tailscale
    "pscale_": r"(?:tkn|oauth|pw)_[\w=.-]{30,}",  # PlanetScale
    "4b1d": r"[A-Za-z0-9]{38}(?![A-Za-z0-9])",  # ClickHouse
    # Secrets' keepers
    **dict.fromkeys(("hvs.", "hvb.", "hvr."), r"[\w-]{20,}"),  # Vault
    "dp.": r"(?:pt|st|ct|sa|scim|audit)\.(?:[\w-]+\.)?[A-Za-z0-9]{40,}",  # Doppler
    "ops_eyJ": r"[A-Za-z0-9+/=_-]{40,}",  # 1Password
    "A3-": r"[A-Z0-9]{6}(?:-[A-Z0-9]{5,11}){3,5}(?![\w-])",  # 1Password
    "AGE-SECRET-KEY-1": r"[0-9A-Za-z]{20,}",
    # Messages
    **dict.fromkeys(
        ("xoxa-", "xoxb-", "xoxe-", "xoxe.", "xoxo-", "xoxp-", "xoxr-", "xoxs-", "xoxc-", "xoxd-"),
        r"[\w.%-]{10,}",
    ),  # Slack
    "xapp-": r"\d-[\w-]{10,}",  # Slack
    "hooks.slack.com/": r"(?:services|workflows|triggers)/[\w/+-]{20,}",
    "discord.com/api/webhooks/": r"\d+/[\w-]{20,}",
    "discordapp.com/api/webhooks/": r"\d+/[\w-]{20,}",
    # Teams, with a tenant's name before it or not; Power Automate, Zapier, Make, IFTTT
    "webhook.office.com/": r"(?:webhookb2|workflows)/[\w@/-]{20,}",
    "outlook.office.com/webhook/": r"[\w@/-]{20,}",
    "outlook.office365.com/webhook/": r"[\w@/-]{20,}",
    "hooks.zapier.com/hooks/": r"(?:catch|standard)/[\w/-]{6,}",
    **dict.fromkeys(("hook.eu1.make.com/", "hook.eu2.make.com/"), r"[a-z0-9]{20,}"),
    **dict.fromkeys(("hook.us1.make.com/", "hook.us2.make.com/"), r"[a-z0-9]{20,}"),
    "maker.ifttt.com/trigger/": r"[\w-]{1,64}/(?:json/)?with/key/[\w-]{16,}",
    # What Apprise calls such places
    **dict.fromkeys(
        ("slack://", "discord://", "tgram://", "msteams://", "workflows://", "pover://"),
        r"[\w:@%./+-]{20,}",
    ),
    "SG.": r"[\w-]{16,}\.[\w-]{16,}",  # SendGrid
    "key-": r"(?=[a-z]{0,32}\d)[0-9a-z]{32}(?![\w-])",  # Mailgun
    "xkeysib-": r"[0-9a-f]{32,}-[A-Za-z0-9]{10,}",  # Brevo
    "SK": r"[0-9a-f]{32}(?![\w-])",  # Twilio
    # Money
    "whsec_": r"[A-Za-z0-9+/=]{20,}",  # Stripe
    "sq0": r"(?:atp|csp)-[\w-]{20,}",  # Square
    "EAAA": _MIXED + r"{50,}",  # Square
    "EAA": r"[A-Za-z]{1,2}(?=[A-Za-z]*\d)[A-Za-z0-9]{80,}",  # Facebook
    **dict.fromkeys(("shpat_", "shpca_", "shppa_", "shpss_"), r"[0-9a-fA-F]{32}"),  # Shopify
    # Watching
    "glc_": r"[A-Za-z0-9+/]{32,}={0,2}",  # Grafana
    "glsa_": r"[A-Za-z0-9]{30,}_[A-Fa-f0-9]{8}",  # Grafana
    "eyJrIjoi": r"[A-Za-z0-9_-]{40,}={0,2}",  # Grafana
    "NRAK-": r"[A-Z0-9]{20,}",  # New Relic
    "sntryu_": r"[0-9a-f]{40,}",  # Sentry
    "sntrys_": r"[\w+/=]{30,}",  # Sentry
    "dt0c01.": r"[A-Za-z0-9]{20,}\.[A-Za-z0-9]{40,}",  # Dynatrace
    # JSON Web Tokens, of whomever; only where a run of their characters begins
    "eyJ": r"(?<![_-]eyJ)[\w-]{8,}+\.[\w-]{8,}+\.[\w-]{4,}",
}
# The longest first, so that `github_pat_` is not read as something shorter.
_PREFIX = re.compile(
    r"(?<![A-Za-z0-9])(?:"
    + "|".join(map(re.escape, sorted(_PREFIXED, key=len, reverse=True)))
    + ")"
)

# Those that have what is typical of them in the middle or at the end. Every repeat is bounded.
_INNER = re.compile(
    r"""
      (?<![0-9])[0-9]{8,10}:AA[\w-]{30,40}(?![\w-])                       # Telegram
    | (?<![0-9a-f])[0-9a-f]{32}-us[0-9]{1,2}(?![0-9])                     # Mailchimp
    | (?<![\w~.-])[\w~.]{3}[0-9]Q~[\w~.-]{25,40}                          # Azure AD
    | (?<![\w-])[MNO](?=[\w-]{0,25}[0-9])[\w-]{23,25}\.[\w-]{6}\.(?=[\w-]{0,26}[0-9])[\w-]{27,38}
                                                                          # Discord
    | (?<![A-Za-z0-9])[A-Za-z0-9]{14}\.atlasv1\.[\w=-]{40,80}             # Terraform
    | (?<![A-Za-z0-9])pat[A-Za-z0-9]{14}\.[0-9a-f]{64}                    # Airtable
    """,
    re.VERBOSE,
)
# What each of them has in it, so that most texts are looked at no further.
_INNER_SIGNS = (":AA", "-us", "Q~", ".atlasv1.", "pat")
_DISCORD_DOTS = re.compile(r"\.[\w-]{6}\.")

_SHORTEST = 15

_KEY_SIGN = "PRIVATE KEY"
_KEY_BORDER = re.compile(r"-----(?P<side>BEGIN|END) [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----")
_KEY_BODY = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/=\\ \t\r\n")
_PUTTY_SIGN = "PuTTY-User-Key-File-"


def redact_shapes(text: str) -> str:
    """Replace every token of a known shape, and every private key."""
    if _KEY_SIGN in text:
        text = _redact_private_keys(text)
    # Its private part comes last.
    text, putty, _ = text.partition(_PUTTY_SIGN)
    if putty:
        text += REDACTED
    # None has a space in it, and most texts have no word of such a length.
    if max(map(len, text.split()), default=0) < _SHORTEST:
        return text
    text = _redact_prefixed(text)
    if any(sign in text for sign in _INNER_SIGNS) or _DISCORD_DOTS.search(text) is not None:
        text = _INNER.sub(REDACTED, text)
    return text


@cache
def _find_body(prefix: str) -> re.Pattern[str]:
    """Compiled when its prefix is first met: most never are."""
    return re.compile(_PREFIXED[prefix])


def _redact_prefixed(text: str) -> str:
    parts: list[str] = []
    done = position = 0
    while (found := _PREFIX.search(text, position)) is not None:
        position = found.end()
        for prefix in _shorten(found[0]):
            body = _find_body(prefix).match(text, found.start() + len(prefix))
            if body is not None:
                parts += text[done : found.start()], REDACTED
                done = position = body.end()
                break
    return text if not parts else "".join((*parts, text[done:]))


def _shorten(prefix: str) -> Iterator[str]:
    """A prefix that was met, and the shorter ones that it begins with."""
    yield prefix
    for length in range(len(prefix) - 1, 1, -1):
        if prefix[:length] in _PREFIXED:
            yield prefix[:length]


def _redact_private_keys(text: str) -> str:
    """Replace private keys, also those whose beginning or end was cut off."""
    parts: list[str] = []
    done = 0
    inside = False
    for border in _KEY_BORDER.finditer(text):
        begins = border["side"] == "BEGIN"
        if inside:
            # The first end ends it; another beginning belongs to it.
            inside, done = begins, done if begins else border.end()
        elif begins:
            parts += text[done : border.start()], REDACTED
            inside, done = True, border.end()
        else:
            kept = border.start()
            while kept > done and text[kept - 1] in _KEY_BODY:
                kept -= 1
            parts += text[done:kept], REDACTED
            done = border.end()
    return "".join(parts if inside else (*parts, text[done:]))
