"""Storage URLs: what is read, what is refused, and that passwords never come out again."""

import psycopg2.extensions
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy.engine import make_url

from storage.errors import StorageError
from storage.url import StorageUrl, is_loopback, parse, psycopg2_dsn, redact, redact_text, sqlalchemy_url

SECRET = "p@ss:w/rd?%#&+ é"
ENCODED = "p%40ss%3Aw%2Frd%3F%25%23%26%2B%20%C3%A9"

text = st.text(st.characters(min_codepoint=32, exclude_characters="\x7f", exclude_categories=["Cs", "Cc"]), min_size=1)


def what_sqlalchemy_connects_with(url):
    parsed = make_url(sqlalchemy_url(url))
    return parsed.get_dialect()().create_connect_args(parsed)[1]


@pytest.mark.parametrize("scheme", ["postgresql", "postgres", "postgresql+psycopg2"])
def test_all_ways_to_write_the_scheme_mean_the_same_server(scheme):
    """Whichever PostgreSQL scheme the user writes, SQLAlchemy gets psycopg2 and psycopg2 gets a libpq URL."""
    url = f"{scheme}://ann:{ENCODED}@db.example:5433/studies?sslmode=require"
    assert parse(url) == StorageUrl("studies", "ann", SECRET, "db.example", 5433, (("sslmode", "require"),))
    assert sqlalchemy_url(url).startswith("postgresql+psycopg2://")
    assert psycopg2_dsn(url).startswith("postgresql://")


def test_libpq_and_sqlalchemy_connect_with_the_same_parameters():
    """User, password and options with special characters reach libpq and SQLAlchemy's psycopg2 unchanged."""
    url = f"postgresql://a%40b:{ENCODED}@db:5433/my%20db?sslmode=require&options=-c%20search_path%3Da%2Bb"
    expected = {
        "user": "a@b",
        "password": SECRET,
        "host": "db",
        "dbname": "my db",
        "sslmode": "require",
        "options": "-c search_path=a+b",
    }
    assert psycopg2.extensions.parse_dsn(psycopg2_dsn(url)) == {**expected, "port": "5433"}
    assert what_sqlalchemy_connects_with(url) == {**expected, "port": 5433}


@pytest.mark.parametrize(
    "url", ["postgresql://ann@/studies?host=/var/run/pg", "postgresql://ann@%2Fvar%2Frun%2Fpg/studies"]
)
def test_the_folder_of_a_unix_socket_survives(url):
    """A unix socket, in either spelling, is what libpq and SQLAlchemy connect to."""
    assert psycopg2.extensions.parse_dsn(psycopg2_dsn(url))["host"] == "/var/run/pg"
    assert what_sqlalchemy_connects_with(url)["host"] == "/var/run/pg"


def test_a_unix_socket_keeps_its_port():
    """The port is part of a socket's file name, so it must reach the driver without a host too."""
    url = "postgresql://ann@%2Fvar%2Frun:5433/studies"
    assert psycopg2.extensions.parse_dsn(psycopg2_dsn(url))["port"] == "5433"
    assert int(what_sqlalchemy_connects_with(url)["port"]) == 5433


def test_an_ipv6_address_survives():
    """An address in brackets keeps its port apart."""
    url = "postgresql://ann@[fd00::2]:5433/studies"
    assert parse(url).host == "fd00::2"
    assert psycopg2.extensions.parse_dsn(psycopg2_dsn(url))["host"] == "fd00::2"
    assert what_sqlalchemy_connects_with(url)["host"] == "fd00::2"


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("sqlite:///hunter2.db", "must start with postgresql://, not sqlite://"),
        ("mysql://ann:hunter2@db/studies", "must start with postgresql://, not mysql://"),
        ("postgresql+asyncpg://ann:hunter2@db/studies", "must start with postgresql://"),
        ("hunter2", "must start with postgresql://"),
        ("", "must start with postgresql://"),
        ("postgresql://ann:hunter2@db:54x/studies", "port"),
        ("postgresql://ann:hunter2@db:99999/studies", "port"),
        ("postgresql://ann:hunter2@db:0/studies", "port"),
        ("postgresql://ann:abc/hunter2@db/studies", "percent-encode"),
        ("postgresql://ann:hunter2@db", "names no database"),
        ("postgresql://ann:hunter2@db/", "names no database"),
        ("postgresql://ann:hunter2@db/studies\n", "control character"),
        ("postgresql://ann:hunter2%00@db/studies", "control character"),
        ("postgresql://ann:hunter2@[::1/studies", "percent-encode"),
        ("postgresql://ann@db/studies?password=hunter2&password=hunter2", "twice"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_sentence_without_the_password(url, says):
    """A URL that is not PostgreSQL's, or is malformed, raises one line that holds nothing of the password."""
    with pytest.raises(StorageError) as raised:
        parse(url)
    message = str(raised.value)
    assert says in message
    assert "\n" not in message
    assert "hunter2" not in message
    assert raised.value.__cause__ is None


def test_redact_hides_every_password():
    """The password and the passwords among the options become ***, all else stays readable."""
    url = f"postgres://ann:{ENCODED}@db/studies?sslmode=require&sslpassword=hunter2&Password=hunter2"
    assert redact(url) == "postgresql://ann:***@db/studies?sslmode=require&sslpassword=***&Password=***"


@pytest.mark.parametrize("url", ["", "hunter2", "mysql://a:hunter2@b/c", "postgresql://a:hunter2@b:x/c", "\x00", None])
def test_redact_of_garbage_is_a_fixed_text(url):
    """What cannot be read is not shown at all, and never raises."""
    assert redact(url) == "<unreadable URL>"


def test_a_parsed_url_does_not_show_its_password():
    """The representation that ends up in tracebacks and logs holds no secret."""
    assert "hunter2" not in repr(parse("postgresql://ann:hunter2@db/studies?sslpassword=hunter2"))


def test_a_message_loses_the_password_however_it_is_spelled():
    """Plain, percent-encoded, inside the URL or alone: no spelling of the password stays in an error message."""
    url = f"postgresql://ann:{ENCODED}@db/studies?sslpassword=hunter2"
    said = redact_text(f"1 {url} 2 {SECRET} 3 {ENCODED} 4 {sqlalchemy_url(url)} 5 hunter2", url)
    assert SECRET not in said
    assert ENCODED not in said
    assert "hunter2" not in said
    assert said.startswith("1 postgresql://ann:***@db/studies?sslpassword=*** 2 *** 3 *** 4 ")


def test_a_message_loses_the_password_of_an_unreadable_url():
    """Even of a URL that cannot be read, what looks like the password is removed."""
    url = "postgresql://ann:hun@ter2@db:x/studies"
    assert redact_text("cannot connect: hun@ter2", url) == "cannot connect: ***"
    assert redact_text("no password here", "") == "no password here"


@given(user=text, password=text, database=text.filter(lambda t: "/" not in t and "@" not in t), value=text)
def test_every_character_survives_the_round_trip(user, password, database, value):
    """Whatever user, password, database and option hold comes out of both renderings as it went in."""
    url = StorageUrl(database, user, password, "db", 5432, (("application_name", value),))
    assert parse(url.render("postgresql")) == url
    assert parse(url.render("postgresql+psycopg2")) == url
    assert redact(url.render("postgresql")) == url.render("postgresql", hide=True)


@given(st.text())
def test_redact_never_raises(garbage):
    """Any text at all may be given to the functions that write error messages."""
    redact(garbage)
    redact_text(garbage, garbage)
    redact("postgresql://" + garbage)
    redact_text(garbage, "postgresql://" + garbage)


@pytest.mark.parametrize(
    ("url", "loopback"),
    [
        ("postgresql://u@127.0.0.1:5432/d", True),
        ("postgresql://u@[::1]/d", True),
        ("postgresql://u@localhost/d", True),
        ("postgresql:///d?host=/run/postgresql", True),
        ("postgresql://u@10.0.0.5/d", False),
        ("postgresql://u@db.example/d", False),
    ],
)
def test_a_server_that_only_its_own_machine_reaches_is_known(url, loopback):
    """Loopback addresses and sockets are not for other nodes."""
    assert is_loopback(url) is loopback
