"""Redaction: secrets go, whatever only sounds like one stays."""

import copy

import pytest

from quark_core.config.redaction import REDACTED, redact_arguments, redact_text, redact_values

SECRET_KEYS = """
    password PASSWORD db_password dbPassword db.password user-password passwd pwd passphrase
    passwords secret client_secret clientSecret SECRET_KEY secrets credentials aws_credentials
    api_key apiKey API_KEY apikey APIKEY x-api-key openai_api_key OPENAI_API_KEY openaiApiKey
    WANDB_API_KEY api_keys api_key_2 aws_access_key_id aws_secret_access_key AWS_SECRET_ACCESS_KEY
    account_key private_key privateKey ssh_key signing_key encryption_key auth_key
    token Token hf_token HF_TOKEN HFToken GITHUB_TOKEN access_token accessToken refresh_token
    auth_token bearer_token session_token slack_bot_token api_token wandb_token
    authorization Authorization auth connection_string MLFLOW_TRACKING_PASSWORD
""".split()

LOOK_ALIKES = {
    "num_tokens": 5,
    "max_tokens": 4096,
    "tokens": 12,
    "tokens_per_second": 1e5,
    "max_token_len": 128,
    "token_type": "bert",
    "token_count": "many",
    "token_embedding": "learned",
    "tokenizer": "gpt2",
    "tokenizer_path": "models/tokenizer.json",
    "cls_token": "[CLS]",
    "pad_token": "<pad>",
    "pad_token_id": 0,
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "unk",
    "mask_token": "<mask>",
    "special_tokens": ["<a>", "<b>"],
    "image_token": "<image>",
    "next_token": "the",
    "use_auth_token": True,
    "monkey": "patch",
    "keyboard": "qwerty",
    "key": "value",
    "keys": ["loss", "lr"],
    "primary_key": "id",
    "sort_key": "step",
    "public_key": "ssh-ed25519 AAAA",
    "key_dim": 64,
    "num_key_value_heads": 8,
    "author": "Ada",
    "authors": ["Ada", "Grace"],
    "passes": 3,
    "pass_through": "yes",
    "compass": "north",
    "secretary": "Bob",
    "commit": "825a948c1f6de2ab4c0b43f6fd4e3f4a7f5b2d11",
    "md5": "9e107d9d372bb6826bd81d3542a419d6",
    "run_id": "2f1c3ad4-8a7e-4b54-9d3f-0c1a5a7f9e10",
    "monitor": "val_loss",
    "password": None,
    "token": "",
}

LETTERS = "aB3dE5gH7jK9mN1pQ3sT5vW7yZ9bC1dE3fG5h"
SECRET_SHAPES = {
    "openai": f"sk-proj-{LETTERS}",
    "anthropic": f"sk-ant-api03-{LETTERS}",
    "hugging face": f"hf_{LETTERS[:34]}",
    "github": f"ghp_{LETTERS}",
    "github server": f"ghs_{LETTERS}",
    "github fine-grained": f"github_pat_11ABC_{LETTERS}",
    "gitlab": f"glpat-{LETTERS[:20]}",
    "aws": "AKIA" + "IOSFODNN7EXAMPLE",
    "aws session": "ASIA" + "IOSFODNN7EXAMPLE",
    "google": f"AIza{LETTERS[:35]}",
    "slack": f"xoxb-123456789012-{LETTERS[:24]}",
    "npm": f"npm_{LETTERS[:36]}",
    "jwt": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N",
}

HARMLESS_TEXTS = [
    "the loss went down",
    "825a948c1f6de2ab4c0b43f6fd4e3f4a7f5b2d11",
    "risk-assessment-of-the-baseline-model",
    "sk-learn-random-forest-baseline",
    "qk_norm_with_learned_temperature",
    "hf_internal_testing/tiny_random_bert",
    "git@github.com:org/repo.git",
    "https://github.com/org/repo?tab=readme",
    "https://example.com/list?next_token=abc&page=2",
    "s3://bucket/path@v1/train.parquet",
    "ada@example.com",
    "-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----",
]

SECRET_URLS = [
    ("https://ada:s3cr3t@example.com/x", "https://[redacted]@example.com/x"),
    ("https://s3cr3t@example.com", "https://[redacted]@example.com"),
    ("postgresql+psycopg://u:s3cr3t@db:5432/runs", "postgresql+psycopg://[redacted]@db:5432/runs"),
    ("postgresql://u:s3c@r3t@db/runs", "postgresql://[redacted]@db/runs"),
    ("redis://:s3cr3t@cache:6379/0", "redis://[redacted]@cache:6379/0"),
    ("https://x.io/a?api_key=s3cr3t&page=2", "https://x.io/a?api_key=[redacted]&page=2"),
    ("https://x.io/a?page=2&token=s3cr3t#top", "https://x.io/a?page=2&token=[redacted]#top"),
    ("see https://u:s3cr3t@a.io and http://u:t0p@b.io", None),
]


@pytest.mark.parametrize("key", SECRET_KEYS)
def test_a_value_under_a_secret_key_goes(key):
    assert redact_values({key: "s3cr3t"}) == {key: REDACTED}


@pytest.mark.parametrize("value", ["s3cr3t", 12345, 1.5, "True story"])
def test_a_password_goes_whatever_it_is(value):
    assert redact_values({"password": value}) == {"password": REDACTED}


@pytest.mark.parametrize(("key", "value"), LOOK_ALIKES.items(), ids=list(LOOK_ALIKES))
def test_a_key_that_only_sounds_alike_keeps_its_value(key, value):
    assert redact_values({key: value}) == {key: value}


def test_secrets_go_at_any_depth_and_nothing_else_does():
    values = {
        "optimizer": {"lr": 0.1, "name": "adam"},
        "tracking": [{"url": "https://x.io", "api_key": "s3cr3t"}, {"hf_token": "s3cr3t"}],
        "env": {"inner": {"headers": {"Authorization": "Bearer s3cr3t", "Accept": "text"}}},
    }
    before = copy.deepcopy(values)
    redacted = redact_values(values)

    assert "s3cr3t" not in str(redacted)
    assert redacted["optimizer"] == values["optimizer"]
    assert redacted["tracking"][0]["url"] == "https://x.io"
    assert redacted["env"]["inner"]["headers"]["Accept"] == "text"
    assert values == before


@pytest.mark.parametrize(
    "values",
    [
        {"password": ["s3cr3t", "s3cr3t too"]},
        {"secrets": {"wandb": "s3cr3t"}},
        {"credentials": {"user": "ada", "value": "s3cr3t"}},
        {"api_keys": {"openai": "s3cr3t"}},
        {"secrets": [{"name": "wandb", "value": "s3cr3t"}]},
    ],
    ids=repr,
)
def test_whatever_lies_below_a_secret_key_goes(values):
    assert "s3cr3t" not in str(redact_values(values))


@pytest.mark.parametrize("secret", SECRET_SHAPES.values(), ids=list(SECRET_SHAPES))
def test_a_token_goes_by_its_shape_wherever_it_stands(secret):
    assert redact_text(secret) == REDACTED
    assert redact_text(f"login with {secret} failed") == f"login with {REDACTED} failed"
    assert redact_values({"note": [f"key={secret};"]}) == {"note": [f"key={REDACTED};"]}
    assert secret not in str(redact_arguments(["train.py", f"--note={secret}"]))


@pytest.mark.parametrize("kind", ["", "RSA ", "EC ", "OPENSSH "])
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "cut off"])
def test_a_private_key_goes(kind, whole):
    end = f"-----END {kind}PRIVATE KEY-----\nafter" if whole else ""
    text = redact_text(f"before\n-----BEGIN {kind}PRIVATE KEY-----\nMIIE\ns3cr3t\n{end}")

    assert "s3cr3t" not in text
    assert text.startswith("before")
    assert text.endswith("after") is whole


@pytest.mark.parametrize("text", HARMLESS_TEXTS)
def test_a_harmless_text_stays(text):
    assert redact_text(text) == text
    assert redact_values({"note": text}) == {"note": text}


@pytest.mark.parametrize(("url", "redacted"), SECRET_URLS, ids=[url for url, _ in SECRET_URLS])
def test_secrets_of_urls_go_and_the_rest_stays(url, redacted):
    found = redact_text(url)

    assert "3cr3t" not in found
    assert "r3t" not in found
    assert "t0p" not in found
    assert redacted is None or found == redacted


@pytest.mark.parametrize(
    "arguments",
    [
        ["--password", "s3cr3t"],
        ["--password=s3cr3t"],
        ["--db-password", "s3cr3t", "--lr", "0.1"],
        ["password=s3cr3t"],
        ["+model.api_key=s3cr3t"],
        ["--wandb_api_key", "s3cr3t"],
        ["--token", "s3cr3t"],
        ["--hf-token=s3cr3t"],
        ["HF_TOKEN=s3cr3t", "train.py"],
        ["--url", "https://ada:s3cr3t@example.com"],
        ["--url=https://example.com?token=s3cr3t"],
    ],
    ids=" ".join,
)
def test_secrets_of_a_command_line_go(arguments):
    redacted = redact_arguments(arguments)

    assert "s3cr3t" not in " ".join(redacted)
    assert len(redacted) == len(arguments)
    assert REDACTED in " ".join(redacted)


@pytest.mark.parametrize(
    "arguments",
    [
        ["train.py", "--lr", "0.1", "--tokenizer", "gpt2", "--num-tokens", "5", "-v"],
        ["--max-token-len=5", "--pad-token=<pad>", "--token-type", "bert", "seed=1"],
        ["--cls-token", "[CLS]", "model.eos_token=</s>", "--author", "Ada", "--keyboard=qwerty"],
        ["--use-password", "--lr", "0.1"],
    ],
    ids=" ".join,
)
def test_a_harmless_command_line_stays(arguments):
    assert redact_arguments(arguments) == arguments


def test_redacting_twice_changes_nothing_more():
    values = {"api_key": "s3cr3t", "url": "https://u:s3cr3t@a.io/?token=s3cr3t", "n": [1, "x"]}
    once = redact_values(values)

    assert redact_values(once) == once
