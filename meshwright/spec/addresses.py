"""Addresses of files elsewhere (s3://bucket/folder): what is one, and which would carry a secret into a run folder."""

import re

ADDRESS = re.compile(r"[a-z][a-z0-9+.-]+://", re.IGNORECASE)
# A password before the host, or a parameter that signs or unlocks: run files and records keep addresses as they are.
PASSWORD = re.compile(r"^[^/?#@]*:[^/?#]*@")
SIGNED = re.compile(
    r"[?&;#](x-(amz|goog)-(signature|credential|security-token)|awsaccesskeyid|signature|sig|\w*token|"
    r"(secret|access|api)?_?key\w*|secret\w*|password|pwd)=",
    re.IGNORECASE,
)


def is_address(text: str) -> bool:
    """Whether a text is an address rather than a path."""
    return ADDRESS.match(text) is not None


def has_secret(text: str) -> bool:
    """Whether an address has a password or a signature in it."""
    if not (begin := ADDRESS.match(text)):
        return False
    rest = text[begin.end() :]
    return PASSWORD.match(rest) is not None or SIGNED.search(rest) is not None


def without_secret(text: str) -> str:
    """An address as it may be shown."""
    begin = ADDRESS.match(text)
    rest = text[begin.end() :] if begin else text
    shown = SIGNED.split(PASSWORD.sub("…@", rest, count=1))[0]
    return f"{begin[0] if begin else ''}{shown}{'' if shown == rest else '…'}"
