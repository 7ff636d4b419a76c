"""Keys for authenticating messages between launchers' own services."""

import hashlib
import hmac
import secrets

__all__ = [
    "DIGEST_LENGTH",
    "HOROVOD_SECRET_KEY",
    "check_digest",
    "compute_digest",
    "make_secret_key",
]

DIGEST_LENGTH = 32
HOROVOD_SECRET_KEY = "_HOROVOD_SECRET_KEY"


def make_secret_key() -> bytes:
    """A fresh random key."""
    return secrets.token_bytes(DIGEST_LENGTH)


def compute_digest(key: bytes, message: bytes) -> bytes:
    """HMAC-SHA256 of a message."""
    return hmac.new(key, message, hashlib.sha256).digest()


def check_digest(key: bytes, message: bytes, digest: bytes) -> bool:
    """Whether the digest belongs to key and message; takes the same time for any wrong digest."""
    return hmac.compare_digest(compute_digest(key, message), digest)
