"""Takes secrets out of what is about to be written.

In goes what people log and configure: JSON values, texts, command lines,
records. Out comes the same with `[redacted]` in place of what is a secret by
its shape (`shapes`: a known kind of token, a private key, the password in a
URL) or by the name that it stands under (`names`: `db_pass`, `hf_token`,
`--password X`, `Authorization: …` inside of a text). What has neither is not
seen; docs/about/redaction.md says what that is.

Everything here takes time linear in the text, changes nothing when it is done
twice, and raises nothing.
"""

from quark_core.config.redaction.detection import REDACTED, is_secret_key, redact_shapes
from quark_core.config.redaction.replacement import (
    cut_text,
    redact_arguments,
    redact_code,
    redact_object,
    redact_record,
    redact_text,
    redact_values,
)

__all__ = [
    "REDACTED",
    "cut_text",
    "is_secret_key",
    "redact_arguments",
    "redact_code",
    "redact_object",
    "redact_record",
    "redact_shapes",
    "redact_text",
    "redact_values",
]
