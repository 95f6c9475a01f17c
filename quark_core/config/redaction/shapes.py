"""Secrets that are known by their shape, wherever they stand.

The shapes are facts that their issuers document, gathered from the rules of
gitleaks (MIT) and the plugins of detect-secrets (Apache-2.0), and from the
issuers where those lag; docs/decisions/0020-secrets-by-shape-and-name.md says
why neither is a dependency. Lengths are the least that is plausible, so that
a token which was cut, or has grown since, is seen too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

REDACTED = "[redacted]"

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
