"""API keys. `tml-<id>-<secret>`: the id finds the row, the secret is 32 random bytes, of which only the SHA-256 is kept.

A plain hash is enough here, unlike for passwords: nobody can guess 256 random bits. The Tinker SDK takes only keys that start with `tml-`.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from dataclasses import dataclass

from .store import Key, Store

ADMIN, USE = "admin", "use"
SCOPES = (USE, ADMIN)
_KEY = re.compile(r"tml-([0-9a-f]{12})-([0-9a-f]{64})")
_NO_DIGEST = hashlib.sha256(b"nobody's").digest()


@dataclass(frozen=True, kw_only=True)
class Principal:
    """Who makes a request: a tenant, by one of its keys. scopes: 'use', and 'admin' for what concerns other tenants."""

    tenant: str
    key_id: str
    scopes: frozenset[str]

    @property
    def is_admin(self) -> bool:
        """Whether other tenants' objects may be listed."""
        return ADMIN in self.scopes


def create_key(store: Store, tenant: str, *, scopes: tuple[str, ...] = (USE,), label: str = "", ttl_s: float | None = None) -> tuple[Key, str]:
    """A new key of a tenant: its record, and its text, which is nowhere else and cannot be had again.

    Raises ValueError for a tenant or scopes that cannot be.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,99}", tenant):
        raise ValueError(f"a tenant's name is up to 100 letters, digits, '.', '_', '@' and '-', a letter or digit first, not {tenant!r}")
    if not scopes or not set(scopes) <= set(SCOPES):
        raise ValueError(f"scopes are of {', '.join(SCOPES)}, not {scopes!r}")
    key_id, secret = secrets.token_hex(6), secrets.token_hex(32)
    now = time.time()
    key = Key(
        id=key_id,
        tenant=tenant,
        label=label[:200],
        digest=hashlib.sha256(secret.encode()).digest(),
        scopes=sorted(set(scopes)),
        created_at=now,
        expires_at=None if ttl_s is None else now + ttl_s,
    )
    return store.add(key), f"tml-{key_id}-{secret}"


class KeyRing:
    """Checks keys. A key that was seen is trusted for `trust_s` before the database is asked again, so a revocation takes effect by then."""

    def __init__(self, store: Store, *, trust_s: float = 2.0, size: int = 10_000) -> None:
        self._store = store
        self._trust_s = trust_s
        self._size = size
        self._seen: dict[str, tuple[Key, float]] = {}

    def remembered(self, given: str) -> Principal | None:
        """The key's owner where the database need not be asked; does not block."""
        parsed = _KEY.fullmatch(given)
        if parsed is None:
            return None
        key, until = self._seen.get(parsed[1], (None, 0.0))
        if key is None or until < time.monotonic():
            return None
        return _checked(key, parsed[2])

    def has_seen(self, given: str) -> bool:
        """Whether a key was good once since the server started; it may have ended since. Does not block."""
        parsed = _KEY.fullmatch(given)
        key = None if parsed is None else self._seen.get(parsed[1], (None, 0.0))[0]
        return parsed is not None and _checked(key, parsed[2]) is not None

    def check(self, given: str) -> Principal | None:
        """The owner of a key that is known, neither expired nor revoked. Blocks: it asks the database."""
        parsed = _KEY.fullmatch(given)
        if parsed is None:
            return None
        key = self._store.get(Key, parsed[1])
        principal = _checked(key, parsed[2])
        if key is not None and principal is not None:
            if len(self._seen) >= self._size:
                self._seen.clear()
            self._seen[parsed[1]] = (key, time.monotonic() + self._trust_s)
        return principal


def _checked(key: Key | None, secret: str) -> Principal | None:
    # The comparison runs for unknown keys too, and takes as long wherever the digests differ.
    same = hmac.compare_digest(hashlib.sha256(secret.encode()).digest(), _NO_DIGEST if key is None else key.digest)
    if key is None or not same or key.revoked_at is not None or (key.expires_at is not None and key.expires_at <= time.time()):
        return None
    return Principal(tenant=key.tenant, key_id=key.id, scopes=frozenset(key.scopes))
