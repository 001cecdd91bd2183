"""Password files as registries read them: ``user:bcrypt`` lines (htpasswd(1) -B).

The hash comes from the C library's crypt(3), which hashes with bcrypt on Debian and Ubuntu (libxcrypt, crypt(5),
prefix ``$2y$``); Python's own module for it is gone from 3.13 on.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import hmac
import threading

from buildkit.errors import MissingComponentError

_ROUNDS = 8  # 2^8: this file guards a registry on loopback, and the registry hashes on every request
_lock = threading.Lock()  # crypt(3) answers in a static buffer


def line(user: str, password: str) -> str:
    """A fresh line for a password file, with a new salt."""
    return f"{user}:{_crypt(password, _salt())}\n"


def matches(text: str, user: str, password: str) -> bool:
    """Whether ``text`` is a password file with this user alone and this password."""
    lines = text.splitlines()
    name, _, stored = lines[0].partition(":") if len(lines) == 1 else ("", "", "")
    if name != user or not stored.startswith("$2"):
        return False
    return hmac.compare_digest(_crypt(password, stored), stored)


def _salt() -> str:
    library = _library()
    library.crypt_gensalt.argtypes = [ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p, ctypes.c_int]
    library.crypt_gensalt.restype = ctypes.c_char_p
    with _lock:
        salt = library.crypt_gensalt(b"$2y$", _ROUNDS, None, 0)
        if not salt:
            raise MissingComponentError("this system's crypt(3) does not know bcrypt")
        return str(salt, "ascii")


def _crypt(password: str, setting: str) -> str:
    library = _library()
    library.crypt.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
    library.crypt.restype = ctypes.c_char_p
    with _lock:
        hashed = library.crypt(password.encode(), setting.encode())
        if not hashed or not hashed.startswith(b"$2"):
            raise MissingComponentError("this system's crypt(3) does not know bcrypt")
        return str(hashed, "ascii")


def _library() -> ctypes.CDLL:
    name = ctypes.util.find_library("crypt")
    if name is None:
        raise MissingComponentError("libcrypt is not installed", hint="on Debian and Ubuntu: apt-get install libcrypt1")
    return ctypes.CDLL(name)
