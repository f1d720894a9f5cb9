"""Which addresses carry a secret, and how they are shown."""

import pytest

from meshwright.spec.addresses import has_secret, is_address, without_secret


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("s3://key:secret@bucket/run", "s3://…@bucket/run…"),
        ("https://host/a.jsonl?X-Amz-Signature=abc&x=1", "https://host/a.jsonl…"),
        ("https://account.blob/c/a?sv=1&sig=abc", "https://account.blob/c/a?sv=1…"),
        ("gs://bucket/run?access_token=abc", "gs://bucket/run…"),
        ("sftp://me:pw@host/run", "sftp://…@host/run…"),
    ],
)
def test_secrets_are_seen_and_not_shown(address, shown):
    assert is_address(address)
    assert has_secret(address)
    assert without_secret(address) == shown


@pytest.mark.parametrize(
    "address",
    [
        "s3://bucket/run", "hf://datasets/me/set@main/x", "abfs://container@account.dfs.core.windows.net/run",
        "memory://a/b?.txt", "file:///tmp/a:b@c", "C:/runs/a", "runs/a@300", "sftp://me@host/run",
    ],
)  # fmt: skip
def test_addresses_without_one_are_left_alone(address):
    assert not has_secret(address)
    assert without_secret(address) == address
