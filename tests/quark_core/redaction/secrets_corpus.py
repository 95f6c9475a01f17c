"""Three hundred secrets in every shape and place, and what an ordinary config looks like.

The secrets are put together as they are asked for, so that no scanner of
repositories takes one for real.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_ORDINARY = Path(__file__).with_name("ordinary_config.txt")


def letters(name: str, count: int) -> str:
    """Letters and digits that depend on the name alone, among them at least one digit."""
    digest = hashlib.sha512(name.encode()).digest() + hashlib.sha512(name[::-1].encode()).digest()
    text = base64.b64encode(digest).decode().replace("+", "x").replace("/", "y").replace("=", "")
    return ("a7" + text * (count // len(text) + 1))[:count]


def hexadecimal(name: str, count: int) -> str:
    return (hashlib.sha512(name.encode()).hexdigest() * (count // 128 + 1))[:count]


def upper(name: str, count: int) -> str:
    return letters(name, count).upper()


def _jwt() -> str:
    parts = [b'{"alg":"HS256","typ":"JWT"}', b'{"sub":"1234567890","name":"Ada"}', b"x" * 32]
    return ".".join(base64.urlsafe_b64encode(part).decode().rstrip("=") for part in parts)


def _private_key(kind: str) -> str:
    body = "\n".join(letters(f"{kind}{line}", 64) for line in range(6))
    return f"-----BEGIN {kind}" + f"PRIVATE KEY-----\n{body}\n-----END {kind}" + "PRIVATE KEY-----"


# Name -> a secret that is known by its shape.
_GUID = "f1d2d2f9-24e9-86ac-1ebf-bdf608c541fd"
SHAPES: dict[str, str] = {
    "together": "tgp_v1_" + letters("together", 43),
    "fireworks": "fw_" + letters("fireworks", 24),
    "anyscale": "esecret_" + letters("anyscale", 24),
    "cerebras": "csk-" + letters("cerebras", 48).lower(),
    "jina": "jina_" + letters("jina", 60),
    "e2b": "e2b_" + hexadecimal("e2b", 40),
    "notion of letters": "ntn_" + letters("notion of letters", 46),
    "mailgun": "key-" + hexadecimal("mailgun", 32),
    "circleci": "CCIPAT_" + letters("circleci", 22) + "_" + hexadecimal("circleci", 40),
    "teams": "webhook.office.com/webhookb2/"
    + f"{_GUID}@{_GUID}/IncomingWebhook/{hexadecimal('teams', 32)}/{_GUID}",
    "teams before": f"outlook.office.com/webhook/{_GUID}@{_GUID}/IncomingWebhook/x/{_GUID}",
    "zapier": "hooks.zapier.com/hooks/catch/1234567/" + letters("zapier", 7).lower() + "/",
    "make": "hook.eu1.make.com/" + letters("make", 32).lower(),
    "ifttt": "maker.ifttt.com/trigger/done/with/key/" + letters("ifttt", 22),
    "openai": "sk-" + letters("openai", 20) + "T3Blbk" + "FJ" + letters("openai2", 20),
    "openai project": "sk-" + "proj-" + letters("project", 90),
    "openai service": "sk-" + "svcacct-" + letters("service", 60),
    "anthropic": "sk-" + "ant-api03-" + letters("anthropic", 93) + "AA",
    "anthropic admin": "sk-" + "ant-admin01-" + letters("admin", 93) + "AA",
    "deepseek": "sk-" + hexadecimal("deepseek", 32),
    "openrouter": "sk-" + "or-v1-" + hexadecimal("openrouter", 64),
    "langfuse": "sk-" + "lf-" + "1f2e3d4c-5b6a-4988-a716-253443526170",
    "hugging face": "hf_" + letters("hf", 34),
    "hugging face oauth": "hf_" + "oauth_" + letters("hfo", 40),
    "hugging face organisation": "api_" + "org_" + letters("hforg", 34),
    "wandb": "wandb_" + "v1_" + letters("wandb", 40),
    "groq": "gsk_" + letters("groq", 52),
    "replicate": "r8_" + letters("replicate", 37),
    "perplexity": "pplx-" + letters("pplx", 48),
    "xai": "xai-" + letters("xai", 80),
    "nvidia": "nvapi-" + letters("nvidia", 64),
    "pinecone": "pcsk_" + letters("pinecone", 60),
    "langsmith": "lsv2_" + "pt_" + hexadecimal("langsmith", 32) + "_" + hexadecimal("ls2", 10),
    "tavily": "tvly-" + letters("tavily", 32),
    "runpod": "rpa_" + upper("runpod", 42),
    "kaggle": "KGAT_" + hexadecimal("kaggle", 32),
    "neptune": base64.b64encode(b'{"api_address":"https://app.neptune.ai","k":1}').decode(),
    "quark": "qk_" + "ab12cd34_" + letters("quark", 40),
    "github": "ghp_" + letters("ghp", 36),
    "github oauth": "gho_" + letters("gho", 36),
    "github user": "ghu_" + letters("ghu", 36),
    "github server": "ghs_" + letters("ghs", 36),
    "github refresh": "ghr_" + letters("ghr", 36),
    "github fine-grained": "github_" + "pat_11ABCDEFG0" + letters("pat", 72),
    "gitlab": "glpat-" + letters("glpat", 20),
    "gitlab deploy": "gldt-" + letters("gldt", 20),
    "gitlab runner": "glrt-" + letters("glrt", 20),
    "gitlab trigger": "glptt-" + hexadecimal("glptt", 40),
    "gitlab registration": "GR13" + "48941" + letters("grr", 20),
    "bitbucket": "ATBB" + letters("atbb", 32),
    "atlassian": "ATATT3" + letters("atatt", 186),
    "npm": "npm_" + letters("npm", 36),
    "pypi": "pypi-" + "AgEIcHlwaS5vcmc" + letters("pypi", 80),
    "pypi test": "pypi-" + "AgENdGVzdC5weXBpLm9yZw" + letters("pypit", 80),
    "rubygems": "rubygems_" + hexadecimal("ruby", 48),
    "docker": "dckr_" + "pat_" + letters("docker", 27),
    "artifactory": "AKCp" + letters("artifactory", 69),
    "nuget": "oy2" + letters("nuget", 43).lower(),
    "sourcegraph": "sgp_" + hexadecimal("sgp", 40),
    "figma": "figd_" + letters("figma", 40),
    "linear": "lin_" + "api_" + letters("linear", 40),
    "notion": "ntn_" + "12345678901" + letters("notion", 35),
    "postman": "PMAK-" + hexadecimal("pm", 24) + "-" + hexadecimal("pm2", 34),
    "prefect": "pnu_" + letters("prefect", 36),
    "pulumi": "pul-" + hexadecimal("pulumi", 40),
    "aws": "AKIA" + upper("aws", 16),
    "aws session": "ASIA" + upper("asia", 16),
    "aws bedrock": "ABSK" + letters("bedrock", 120),
    "google": "AIza" + letters("google", 35),
    "google oauth": "ya29." + letters("ya29", 60),
    "google client secret": "GOCSPX-" + letters("gocspx", 28),
    "alibaba": "LTAI" + letters("alibaba", 20),
    "databricks": "dapi" + hexadecimal("databricks", 32),
    "digitalocean": "dop_" + "v1_" + hexadecimal("do", 64),
    "digitalocean refresh": "dor_" + "v1_" + hexadecimal("dor", 64),
    "heroku": "HRKU-" + "AA" + letters("heroku", 58),
    "cloudflare": "v1.0-" + hexadecimal("cf", 24) + "-" + hexadecimal("cf2", 146),
    "fly": "fo1_" + letters("fly", 43),
    "supabase": "sbp_" + hexadecimal("supabase", 40),
    "tailscale": "tskey-" + "auth-" + letters("tailscale", 30),
    "planetscale": "pscale_" + "tkn_" + letters("pscale", 43),
    "vault": "hvs." + letters("vault", 95),
    "vault batch": "hvb." + letters("vaultb", 140),
    "doppler": "dp." + "pt." + letters("doppler", 43),
    "1password": "ops_" + "eyJ" + letters("1p", 260),
    "age": "AGE-SECRET-" + "KEY-1" + upper("age", 58),
    "slack bot": "xoxb-" + "123456789012-123456789012-" + letters("slack", 24),
    "slack user": "xoxp-" + "123456789012-123456789012-123456789012-" + hexadecimal("xoxp", 32),
    "slack app": "xapp-" + "1-A0123456789-1234567890123-" + hexadecimal("xapp", 64),
    "slack webhook": "hooks.slack." + "com/services/T01234567/B01234567/" + letters("hook", 24),
    "discord webhook": "discord." + "com/api/webhooks/123456789012345678/" + letters("dw", 68),
    "discord bot": "MTIzNDU2Nzg5MDEyMzQ1Njc4" + ".G1x2Yz." + letters("discord", 38),
    "telegram": "123456789" + ":AA" + letters("telegram", 33),
    "sendgrid": "SG." + letters("sg", 22) + "." + letters("sg2", 43),
    "brevo": "xkeysib-" + hexadecimal("brevo", 64) + "-" + letters("brevo2", 16),
    "mailchimp": hexadecimal("mailchimp", 32) + "-us12",
    "twilio": "SK" + hexadecimal("twilio", 32),
    "stripe": "sk_" + "live_" + letters("stripe", 24),
    "stripe restricted": "rk_" + "live_" + letters("striper", 24),
    "stripe webhook": "whsec_" + letters("whsec", 32),
    "square": "sq0" + "csp-" + letters("square", 43),
    "shopify": "shpat_" + hexadecimal("shopify", 32),
    "facebook": "EAAC" + letters("facebook", 120),
    "grafana": "glsa_" + letters("grafana", 32) + "_" + hexadecimal("gr", 8),
    "grafana cloud": "glc_" + letters("glc", 64),
    "new relic": "NRAK-" + upper("newrelic", 27),
    "sentry": "sntryu_" + hexadecimal("sentry", 64),
    "dynatrace": "dt0c01." + upper("dt", 24) + "." + upper("dt2", 64),
    "terraform": letters("tf", 14) + ".atlas" + "v1." + letters("tf2", 67),
    "airtable": "pat" + letters("at", 14) + "." + hexadecimal("at2", 64),
    "azure ad": "abc" + "8Q~" + letters("azuread", 34),
    "json web token": _jwt(),
    "rsa key": _private_key("RSA "),
    "openssh key": _private_key("OPENSSH "),
    "key": _private_key(""),
}

# Names that tell, in the spellings that people use.
NAMES: tuple[str, ...] = tuple(
    """
    password PASSWORD dbPassword db.password user-password passwd pwd passphrase PGPASSWORD
    dbpassword MYSQL_PWD db_pass dbpass userpass SMTP_PASS smtp.pass redis_pw password_2
    password_prod secret client_secret clientSecret SECRET_KEY django_secret_key app_secret
    jwt_secret webhook_secret credentials aws_credentials creds db_creds api_key apiKey API_KEY
    apikey x-api-key OPENAI_API_KEY openaiApiKey openai_key wandb_key hf_key anthropic_key
    github_key AZURE_KEY gcp_key sentry_key stripe_key WANDB_API_KEY api_key_2
    aws_access_key_id aws_secret_access_key AWS_SECRET_ACCESS_KEY accessKey account_key
    storage_key private_key ssh_key signing_key encryption_key auth_key master_key license_key
    fernet_key subscription_key consumer_key session_key hmac_key pre_shared_key psk token
    Token hf_token HF_TOKEN HFToken hftoken GITHUB_TOKEN access_token accessToken accesstoken
    refresh_token auth_token authToken bearer_token session_token slack_bot_token api_token
    wandb_token hub_token push_token csrf_token id_token sas_token neptune_api_token
    X-Amz-Security-Token authorization Authorization Proxy-Authorization bearer jwt Cookie
    cookie session_cookie Set-Cookie connection_string conn_str REDISCLI_AUTH basic_auth
    github_pat azure_sas seed_phrase recovery_code wandb.api_key model.tracker.hf_token
    secret_value token_github client-key-data sessionid csrf PHPSESSID openai_api_key privateKey
    db_password MLFLOW_TRACKING_PASSWORD auth APIKEY api_keys secrets
    """.split()
)

# Command lines; {} is the secret.
COMMAND_LINES: tuple[tuple[str, ...], ...] = (
    ("--password", "{}"),
    ("--password={}",),
    ("--password", "-{}"),
    ("--pass", "{}"),
    ("--pass={}",),
    ("--passwd", "{}"),
    ("--db-password", "{}", "--lr", "0.1"),
    ("password={}",),
    ("+model.api_key={}",),
    ("++trainer.logger.api_key={}",),
    ("--wandb_api_key", "{}"),
    ("--wandb-key", "{}"),
    ("--token", "{}"),
    ("--hf-token", "{}"),
    ("--hf-token={}",),
    ("--hf_token", "{}"),
    ("--auth-token", "{}"),
    ("--access_token={}",),
    ("--access_token", "{}"),
    ("--api-token", "{}"),
    ("--hub_token", "{}"),
    ("-token", "{}"),
    ("--api-keys", "{}", "another-{}"),
    ("--secret", "{}"),
    ("--client-secret", "{}"),
    ("HF_TOKEN={}", "python", "train.py"),
    ("-p", "{}"),
    ("mysql", "-u", "ada", "-p{}"),
    ("mysql", "-uroot", "-p", "{}"),
    ("curl", "-u", "ada:{}", "https://example.com"),
    ("curl", "-H", "Authorization: Bearer {}"),
    ("curl", "-H", "X-API-Key: {}"),
    ("docker", "run", "-e", "PGPASSWORD={}"),
    ("--url", "https://ada:{}@example.com"),
    ("--url=https://example.com?token={}",),
    ("wandb", "login", "--key", "x", "--api-key={}"),
)

# Texts with a telling name in them; {} is the secret.
TEXTS: tuple[str, ...] = (
    "the password={}",
    "password = {}",
    "password: {}",
    "login failed for ada with password={} at db:5432",
    "PASSWORD='{}'",
    'connect(host="db", password="{}")',
    "connect(host='db', passwd='{}', port=5432)",
    "psycopg2.OperationalError: host=db user=ada password={} dbname=runs",
    "Server=db;Database=runs;User Id=ada;Password={};Encrypt=yes",
    "DefaultEndpointsProtocol=https;AccountName=ada;AccountKey={};EndpointSuffix=core.windows.net",
    "Endpoint=sb://x.servicebus.windows.net/;SharedAccessKeyName=Root;SharedAccessKey={}",
    'os.environ["WANDB_API_KEY"] = "{}"',
    "export OPENAI_API_KEY={}",
    "set HF_TOKEN={}&& python train.py",
    "env: {{'HF_TOKEN': '{}', 'LR': '0.1'}}",
    '{{"api_key": "{}", "lr": 0.1}}',
    '{{"outer": "{{\\"api_key\\": \\"{}\\"}}"}}',
    "api_key: {}\nlr: 0.1",
    "API key: {}",
    "access token={}",
    "client_secret => {}",
    "Authorization: Bearer {}",
    "Authorization: token {}",
    "authorization: {}",
    "headers={{'Authorization': 'Bearer {}'}}",
    "-H 'X-Auth-Token: {}'",
    "Cookie: session={}; theme=dark",
    "Set-Cookie: sid={}; HttpOnly",
    "python train.py --hf-token {} --lr 0.1",
    "python train.py --password {}",
    "sshpass -p {} ssh ada@node1",
    "curl -u ada:{} https://example.com/x",
    "machine example.com login ada password {}",
    "//packages.example.org/:_authToken={}",
    "<password>{}</password>",
    "CREATE USER ada WITH PASSWORD '{}'",
    "the password '{}' was refused",
    "got bearer {} from the proxy",
    'Traceback (most recent call last):\n  File "x.py"\n    login(token="{}")\nValueError: no',
    "retrying with token={} after 3 s",
    "aws_secret_access_key = {}",
    "db_pass: {}",
    "[default]\naws_secret_access_key={}\nregion=eu",
    "kwargs={{'auth_token': 'Bearer {}'}}",
    "user: ada\npassword: >-\n  {}\nlr: 0.1",
    "password: |\n    {}\n",
    "Password:\n{}\nwelcome",
    "db:\n  password:\n    {}\n  port: 5432",
    "| hf_token | {} |",
    "name       value\nhf_token   {}\nlr         0.1",
    "│ api_key │ {} │",
    "    client-key-data: {}",
    "Cookie was sessionid={}; path=/",
    "csrf={}",
)

# URLs; {} is the secret.
URLS: tuple[str, ...] = (
    "https://ada:{}@example.com/x",
    "https://{}@example.com/x.git",
    "https://oauth2:{}@gitlab.example.com/group/repo.git",
    "postgresql+psycopg://ada:{}@db:5432/runs",
    "postgresql://ada:a/{}@db/runs",
    "postgresql://ada:a#{}@db/runs",
    "postgresql://ada:a?{}@db/runs",
    "postgresql://ada:1/{}@db/runs",
    "postgresql://ada:a@{}@db/runs",
    "mysql://root:{}@127.0.0.1/x",
    "mongodb+srv://ada:{}@cluster0.abcde.mongodb.net/?retryWrites=true",
    "redis://:{}@cache:6379/0",
    "amqp://guest:{}@rabbit:5672/vhost",
    "ftp://ada:{}@files.example.com/data.tar",
    "git+https://{}@github.com/org/repo.git@main",
    "https://example.com/a?api_key={}&page=2",
    "https://example.com/a?page=2&token={}#top",
    "https://example.com/a?access_token={}",
    "https://account.blob.core.windows.net/c/f?sv=2022-11-02&sr=b&sig={}&se=2030-01-01",
    "https://bucket.s3.amazonaws.com/k?X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Signature={}",
    "https://bucket.s3.amazonaws.com/k?X-Amz-Security-Token={}&X-Amz-Expires=60",
    "https://bucket.s3.amazonaws.com/k?AWSAccessKeyId=x&Signature={}&Expires=1",
    "https://storage.googleapis.com/b/k?X-Goog-Signature={}&X-Goog-Expires=60",
    "https://d111.cloudfront.net/f?Expires=1&Signature={}&Key-Pair-Id=K2JCJMDEHXQW5F",
)


@dataclass(frozen=True)
class Planted:
    """One secret in one place.

    Attributes:
        name: What it is, for a failure.
        form: `values`, `argv` or `text`.
        content: What holds it, in that form.
        secret: What must not be found afterwards.
    """

    name: str
    form: str
    content: Any
    secret: str


def list_secrets() -> list[Planted]:
    """Every secret of this module, each with bytes of its own."""
    return [*_plant_shapes(), *_plant_names(), *_plant_nested(), *_plant_texts()]


def _plant_shapes() -> Iterator[Planted]:
    places: list[Callable[[str], tuple[str, Any]]] = [
        lambda secret: ("text", secret),
        lambda secret: ("text", f"the call with {secret} failed"),
        lambda secret: ("values", {"note": [f"key={secret};"]}),
        lambda secret: ("argv", ["train.py", f"--note={secret}"]),
    ]
    for index, (name, secret) in enumerate(SHAPES.items()):
        form, content = places[index % len(places)](secret)
        yield Planted(name, form, content, secret)


def _plant_names() -> Iterator[Planted]:
    for index, name in enumerate(NAMES):
        secret = _make(name, index)
        yield Planted(name, "values", {name: secret}, secret)


def _plant_nested() -> Iterator[Planted]:
    forms: dict[str, Callable[[str], Any]] = {
        "tokens": lambda secret: {"tokens": ["lr", secret]},
        "tokens by service": lambda secret: {"tokens": {"hf": secret}},
        "hf_tokens": lambda secret: {"hf_tokens": [secret, secret]},
        "passwords": lambda secret: {"passwords": [secret]},
        "below secrets": lambda secret: {"secrets": {"wandb": secret}},
        "below a service": lambda secret: {"wandb": {"key": secret}},
        "below an account": lambda secret: {"smtp": {"pass": secret}},
        "bearer value": lambda secret: {"auth_token": f"Bearer {secret}"},
        "headers": lambda secret: {"headers": {"Authorization": f"Bearer {secret}"}},
        "basic auth": lambda secret: {"auth": ["ada", secret]},
        "pairs": lambda secret: {"env": [["DB_PASSWORD", secret]]},
        "named": lambda secret: {"env": [{"name": "DB_PASSWORD", "value": secret}]},
        "a command": lambda secret: {"cmd": ["run", "--password", secret]},
        "cookies": lambda secret: {"cookies": {"session": secret}},
        "deep": lambda secret: {"a": {"b": [{"c": {"api_key": secret}}]}},
        "a number": lambda secret: {"password": int.from_bytes(secret.encode()[:7])},
    }
    for index, (name, build) in enumerate(forms.items()):
        secret = _make(name, index)
        shown = str(int.from_bytes(secret.encode()[:7])) if name == "a number" else secret
        yield Planted(name, "values", build(secret), shown)


def _plant_texts() -> Iterator[Planted]:
    for index, words in enumerate(COMMAND_LINES):
        secret = _make("".join(words), 2 * index)
        yield Planted(" ".join(words), "argv", [word.format(secret) for word in words], secret)
    for template in (*TEXTS, *URLS):
        secret = _make(template, 0)
        yield Planted(template, "text", template.format(secret), secret)


def _make(name: str, index: int) -> str:
    """A secret without a shape; every third one without a digit, as passwords are."""
    if index % 3 == 1:
        plain = "".join(c for c in letters(name + "!", 40) if c.isalpha())
        return "correct" + plain[:9]
    return "Zq" + letters(name, 18)


def read_ordinary_config() -> list[tuple[str, Any]]:
    """A thousand and some keys with their values, none of them secret."""
    lines = _ORDINARY.read_text().splitlines()
    pairs = (line.split(" = ", 1) for line in lines if not line.startswith("#"))
    return [(key, json.loads(value)) for key, value in pairs]
