"""The file of API keys, and the command that writes it."""

import stat
from pathlib import Path

import pytest

from chairlift.cli import main
from chairlift.config.keys import hash_of, read_keys
from chairlift.config.server import ServerConfig
from chairlift.config.settings import load
from chairlift.errors import ConfigError

A, B = hash_of("a"), hash_of("b")


def write(folder: Path, text: str) -> Path:
    path = folder / "keys.toml"
    path.write_text(text)
    return path


def test_an_entry_has_hashes_rights_and_limits(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        f"""
        [keys.alice]
        sha256 = ["{A}", "{B}"]
        rights = ["infer", "batch"]
        requests_per_minute = 60
        tokens_per_minute = 1000
        requests_at_once = 4
        priorities = [0, 10]

        [keys.scraper]
        sha256 = ["{hash_of("c")}"]
        rights = ["metrics"]
        """,
    )
    entries = read_keys(path)
    alice = entries["alice"]
    assert (alice.sha256, alice.rights, alice.priorities) == ([A, B], ["infer", "batch"], (0, 10))
    allowed = alice.allowance
    assert (allowed.requests_per_minute, allowed.tokens_per_minute, allowed.requests_at_once) == (60, 1000, 4)
    assert entries["scraper"].rights == ["metrics"]
    assert entries["scraper"].allowance.requests_per_minute is None


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", r"keys\.toml has no keys, so nobody could come in: chairlift keys add"),
        ("[keys]", "has no keys"),
        ("[keys.alice", "not valid TOML"),
        ("keys = 1", r"must hold tables \[keys\.NAME\]"),
        ("[key.alice]", r"must hold tables \[keys\.NAME\]"),
        ('[keys.alice]\nrights = ["infer"]', r"keys\.alice: .*sha256"),
        (f'[keys.alice]\nsha256 = ["{A}"]', r"keys\.alice: .*rights"),
        ('[keys.alice]\nsha256 = ["secret"]\nrights = []', r"keys\.alice: .*matching regex"),
        ("[keys.alice]\nsha256 = []\nrights = []", r"keys\.alice: .*length >= 1"),
        (f'[keys.alice]\nsha256 = ["{A}"]\nrights = ["fly"]', r"keys\.alice: .*'fly'"),
        (f'[keys.alice]\nsha256 = ["{A}"]\nrights = []\nrequests_per_minute = 0', r"keys\.alice: .*>= 1"),
        (f'[keys.alice]\nsha256 = ["{A}"]\nrights = []\nrequests = 1', r"keys\.alice: .*unknown field requests"),
        (f'[keys.alice]\nsha256 = ["{A}"]\nrights = []\npriorities = [2, 1]', r"keys\.alice: priorities must be"),
        (f'[keys."a b"]\nsha256 = ["{A}"]\nrights = []', "a key's name has up to 64 letters"),
        (
            f'[keys.a]\nsha256 = ["{A}"]\nrights = []\n[keys.b]\nsha256 = ["{A}"]\nrights = []',
            r"keys\.b and keys\.a have the same sha256",
        ),
    ],
)
def test_what_is_wrong_is_named(text: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=problem):
        read_keys(write(tmp_path, text))


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = write(tmp_path, f'\ufeff[keys.alice]\nsha256 = ["{A}"]\nrights = []\n')
    assert list(read_keys(path)) == ["alice"]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the key file .*none\.toml can't be read"):
        read_keys(tmp_path / "none.toml")


def test_the_command_makes_keys_and_keeps_their_hashes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys.toml"
    limits = ["--requests-per-minute", "60", "--tokens-per-minute", "9", "--requests-at-once", "2"]
    assert main(["keys", "add", "alice", "--file", str(path), *limits, "--priorities", "0", "5"]) == 0
    first = capsys.readouterr().out.strip()
    assert main(["keys", "add", "ops", "--file", str(path), "--rights", "admin,metrics"]) == 0
    second = capsys.readouterr().out.strip()
    assert first != second
    assert min(len(first), len(second)) >= 43
    text = path.read_text()
    assert first not in text
    assert second not in text
    entries = read_keys(path)
    assert (entries["alice"].sha256, entries["alice"].rights) == ([hash_of(first)], ["infer", "batch"])
    assert (entries["alice"].requests_per_minute, entries["alice"].priorities) == (60, (0, 5))
    assert (entries["ops"].sha256, entries["ops"].rights) == ([hash_of(second)], ["admin", "metrics"])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["alice"], "has keys.alice already"),
        (["bob smith"], "a key's name has"),
        (["bob", "--rights", "fly"], "'fly'"),
        (["bob", "--requests-per-minute", "0"], "requests_per_minute"),
        (["bob", "--priorities", "2", "1"], "priorities must be"),
    ],
)
def test_the_command_writes_nothing_wrong(
    flags: list[str], problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, f'[keys.alice]\nsha256 = ["{A}"]\nrights = []\n')
    before = path.read_text()
    assert main(["keys", "add", *flags, "--file", str(path)]) == 1
    output = capsys.readouterr()
    assert problem in output.err
    assert output.out == ""
    assert path.read_text() == before


def test_the_command_makes_a_key_to_be_added_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "new"]) == 0
    key, line = capsys.readouterr().out.splitlines()
    assert line == f"sha256 = {hash_of(key)}"


def test_paths_are_relative_to_the_settings_file(tmp_path: Path) -> None:
    folder = tmp_path / "etc"
    folder.mkdir()
    model = tmp_path / "m.onnx"
    model.touch()
    (folder / "c.toml").write_text('api_keys = "keys.toml"\ntls_cert = "a.pem"\ntls_key = "/b.pem"\ntls_ca = "c.pem"\n')
    made = load({"config": "etc/c.toml"}, {}, tmp_path, str(model)).server
    assert made.api_keys == str(folder / "keys.toml")
    assert (made.tls_cert, made.tls_key, made.tls_ca) == (str(folder / "a.pem"), "/b.pem", str(folder / "c.pem"))
    above = load({"config": "etc/c.toml"}, {"CHAIRLIFT_API_KEYS": "mine.toml"}, tmp_path, str(model)).server
    assert above.api_keys == "mine.toml"


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"tls_cert": "a"}, "tls_cert and tls_key go together"),
        ({"tls_key": "a"}, "tls_cert and tls_key go together"),
        ({"tls_ca": "a"}, "tls_ca asks clients for certificates"),
    ],
)
def test_half_of_tls_is_refused(settings: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        ServerConfig(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["host", "api_key", "api_keys", "tls_cert", "tls_key", "tls_ca", "record"])
def test_what_is_empty_opens_nothing(name: str, tmp_path: Path) -> None:
    given = {"tls_cert": "a", "tls_key": "b", name: ""}
    with pytest.raises(ConfigError, match=f"{name} must not be empty; leave it out"):
        ServerConfig(**given)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"{name} must not be empty; leave it out"):
        load({"model": "os:Class"} | given, {}, tmp_path, "")


@pytest.mark.parametrize("name", ["api_key", "api_keys", "tls_cert", "tls_key", "tls_ca"])
def test_an_empty_variable_opens_nothing(name: str, tmp_path: Path) -> None:
    variable = f"CHAIRLIFT_{name.upper()}"
    with pytest.raises(ConfigError, match=f"{variable} is empty, which would open"):
        load({"model": "os:Class"}, {variable: ""}, tmp_path, "")
    assert load({"model": "os:Class"}, {"CHAIRLIFT_HOST": ""}, tmp_path, "").server.host == "127.0.0.1"


def test_a_key_that_no_client_can_send_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="white space around it"):
        load({"model": "os:Class"}, {"CHAIRLIFT_API_KEY": "secret\n"}, tmp_path, "")
