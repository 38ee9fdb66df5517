"""Certificates for tests, made by the openssl command: authorities, and what they sign."""

import shutil
import ssl
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")


class Pair(NamedTuple):
    """A certificate and its key, as PEM files."""

    certificate: Path
    key: Path


def _request(folder: Path, name: str, *more: str) -> Pair:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs the openssl command")
    made = Pair(folder / f"{name}.pem", folder / f"{name}.key")
    files = ("-keyout", str(made.key), "-out", str(made.certificate))
    command = [openssl, "req", "-x509", *_NEW_KEY, "-subj", f"/CN={name}", *files, *more]
    subprocess.run(command, check=True, capture_output=True)
    return made


def authority(folder: Path, name: str) -> Pair:
    """Somebody who signs certificates."""
    return _request(folder, name, "-addext", "keyUsage=critical,keyCertSign,cRLSign")


def signed(folder: Path, name: str, by: Pair) -> Pair:
    """A certificate for this machine, or for a client of this name."""
    return _request(
        folder,
        name,
        *("-CA", str(by.certificate), "-CAkey", str(by.key)),
        *("-addext", "basicConstraints=critical,CA:FALSE"),
        *("-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"),
    )


def install(pair: Pair, place: Pair) -> None:
    """Put a certificate in the place of another, as renewals do: each file at once, the two one after the other."""
    for source, target in zip(pair, place, strict=True):
        new = target.with_suffix(".new")
        shutil.copyfile(source, new)
        new.replace(target)


def trusting(authority: Pair, own: Pair | None = None) -> ssl.SSLContext:
    """A client's side: whom it trusts, and what it shows."""
    context = ssl.create_default_context(cafile=str(authority.certificate))
    if own is not None:
        context.load_cert_chain(own.certificate, own.key)
    return context
