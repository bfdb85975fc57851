from __future__ import annotations

import base64
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dstack_shim.resources.ssh_keys import BadKey, PublicKey, is_ours, marked, merge, parse_key
from tests.shim.resources.stage import MARKER, key, line, string

ONE, TWO, THREE = key(1, "one@host"), key(2), key(3, "three")


def encoded(*fields: bytes) -> str:
    return base64.b64encode(b"".join(map(string, fields))).decode()


def test_a_key_is_rebuilt_with_single_spaces() -> None:
    kind, blob, comment = ONE.split()
    parsed = parse_key(f" \t{kind}  {blob}\t {comment}   and\tmore \r\n")
    assert parsed.line == line(f"{kind} {blob} {comment} and more")


def test_a_key_without_a_comment_gets_just_the_marker() -> None:
    assert parse_key(TWO).line == line(TWO)


@pytest.mark.parametrize(
    "comment", ["émile@hôte", "🚀 launch", "$(reboot) `x` 'y' \"z\" #", "a b"]
)
def test_a_comment_may_be_any_printable_text(comment: str) -> None:
    parsed = parse_key(key(1, comment))
    assert parsed.line.decode() == f"{key(1)} {comment} # added by dstack-shim"
    assert merge(parsed.line + b"\n", [parsed]).added == ()


POINT = b"\x04" + bytes(64)


@pytest.mark.parametrize(
    "fields",
    [
        (b"ssh-rsa", b"\x01\x00\x01", b"\x00\xf0" + bytes(256)),
        (b"ssh-dss", b"\x01", b"\x02", b"\x03", b"\x04"),
        (b"ssh-ed25519", bytes(32)),
        (b"sk-ssh-ed25519@openssh.com", bytes(32), b"ssh:"),
        (b"ecdsa-sha2-nistp256", b"nistp256", POINT),
        (b"ecdsa-sha2-nistp384", b"nistp384", b"\x04" + bytes(96)),
        (b"ecdsa-sha2-nistp521", b"nistp521", b"\x04" + bytes(132)),
        (b"sk-ecdsa-sha2-nistp256@openssh.com", b"nistp256", POINT, b"ssh:"),
    ],
    ids=lambda fields: fields[0].decode(),
)
def test_every_key_type_of_openssh_is_read_and_malformed_ones_are_not(
    fields: tuple[bytes, ...],
) -> None:
    kind = fields[0].decode()
    assert parse_key(f"{kind} {encoded(*fields)}").kind == kind
    for broken in (
        encoded(*fields[:-1]),
        encoded(*fields, b"one too many", b"and another"),
        encoded(*fields[:-2], b"", fields[-1]),
        base64.b64encode(b"".join(map(string, fields))[:-1]).decode(),
        base64.b64encode(b"".join(map(string, fields)) + b"\0\0").decode(),
    ):
        with pytest.raises(BadKey):
            parse_key(f"{kind} {broken}")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "type and a base64"),
        ("   \t ", "type and a base64"),
        ("ssh-ed25519", "type and a base64"),
        ("AAAAC3NzaC1lZDI1NTE5 ssh-ed25519", "options are not allowed"),
        ("# " + ONE, "options are not allowed"),
        ("no-pty " + ONE, "options are not allowed"),
        ('command="rm -rf /" ' + ONE, "options are not allowed"),
        ('from="10.0.0.1",no-pty ' + ONE, "options are not allowed"),
        ("SSH-ED25519 " + ONE.split()[1], "options are not allowed"),
        (ONE + "\n" + TWO, "more than one line"),
        (ONE + "\r" + TWO, "more than one line"),
        (ONE + "\0", "more than one line"),
        (ONE + " a\x1bb", "more than one line"),
        (ONE + " a\x85b", "more than one line"),
        (ONE + " \ud800", "more than one line"),
        ("ssh-ed25519 not/base64", "not base64"),
        ("ssh-ed25519 AAAA!AAA", "not base64"),
        ("ssh-ed25519 ÄÖÜ=", "not base64"),
        ("ssh-ed25519 =", "another type|not base64"),
        ("ssh-rsa " + ONE.split()[1], "another type"),
        ("ssh-ed25519-cert-v01@openssh.com AAAA", "certificate"),
        (
            "ecdsa-sha2-nistp256 " + encoded(b"ecdsa-sha2-nistp256", b"nistp384", POINT),
            "malformed",
        ),
        (
            "ecdsa-sha2-nistp256 " + encoded(b"ecdsa-sha2-nistp256", b"nistp256", b"\2"),
            "malformed",
        ),
        ("ssh-rsa " + encoded(b"ssh-rsa", b"\x81", b"\x01"), "malformed"),
        ("ssh-rsa " + encoded(b"ssh-rsa", b"\x00", b"\x01"), "malformed"),
        ("ssh-ed25519 AAAA", "cut off"),
        ("ssh-ed25519 /////w==", "cut off"),
    ],
)
def test_what_is_not_one_plain_key_is_refused(text: str, why: str) -> None:
    with pytest.raises(BadKey, match=why):
        parse_key(text)


@pytest.mark.parametrize(
    "text", ['environment="TOKEN=s3cret" ssh-rsa AAAA', "ssh-rsa s3cret!", "s3cret", "a\ns3cret"]
)
def test_a_refusal_never_quotes_the_text(text: str) -> None:
    with pytest.raises(BadKey) as caught:
        parse_key(text)
    assert "s3cret" not in str(caught.value)


@given(st.text() | st.text().map(lambda comment: f"{key(1)} {comment}"))
def test_any_text_is_one_line_or_refused(text: str) -> None:
    with suppress(BadKey):
        assert parse_key(text).line.count(b"\n") == 0


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen is not installed")
@pytest.mark.parametrize("kind", ["rsa", "ecdsa", "ed25519"])
def test_fingerprints_are_those_of_ssh_keygen_and_it_reads_our_file(
    kind: str, tmp_path: Path
) -> None:
    private = tmp_path / "id"
    words = ["ssh-keygen", "-q", "-t", kind, "-N", "", "-C", f"a {kind} key", "-f", str(private)]
    subprocess.run(words, check=True, timeout=60)
    parsed = parse_key(private.with_suffix(".pub").read_text(encoding="ascii"))
    file = tmp_path / "authorized_keys"
    file.write_bytes(merge(b"# a comment\r\n\n", [parsed, parse_key(ONE)]).content)
    shown = subprocess.run(
        ["ssh-keygen", "-l", "-f", str(file)],
        check=True,
        timeout=60,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    assert [row.split()[1] for row in shown] == [
        parsed.fingerprint,
        parse_key(ONE).fingerprint,
    ]
    assert f"a {kind} key # added by dstack-shim" in shown[0]


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen is not installed")
def test_a_certificate_made_by_ssh_keygen_is_refused(tmp_path: Path) -> None:
    for name in ("authority", "user"):
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name)]
        subprocess.run(words, check=True, timeout=60)
    words = ["ssh-keygen", "-q", "-s", "authority", "-I", "id", "user.pub"]
    subprocess.run(words, check=True, timeout=60, cwd=tmp_path)
    with pytest.raises(BadKey, match=r"certificate"):
        parse_key((tmp_path / "user-cert.pub").read_text(encoding="ascii"))


@pytest.mark.parametrize(
    ("text", "ours"),
    [
        (b"ssh-rsa AAAA me # added by dstack-shim", True),
        (b"ssh-rsa AAAA me # added by dstack-shim \t\r", True),
        (b" # added by dstack-shim", True),
        (b"# a note # added by dstack-shim", True),
        (b"# added by dstack-shim", False),
        (b"ssh-rsa AAAA me# added by dstack-shim", False),
        (b"ssh-rsa AAAA me\t# added by dstack-shim", False),
        (b"ssh-rsa AAAA me # added by dstack", False),
        (b"ssh-rsa AAAA me # added by dstack-shim2", False),
        (b"ssh-rsa AAAA me # added by dstack-shim # really", False),
        (b"ssh-rsa AAAA me # Added by dstack-shim", False),
        (b"ssh-rsa AAAA me #  added by dstack-shim", False),
        (b"ssh-rsa AAAA me # added by dstack-shim\x0b", False),
        (b"", False),
    ],
)
def test_a_line_is_ours_by_its_marker_alone(text: bytes, ours: bool) -> None:
    assert is_ours(text) is ours


def test_our_lines_come_last_and_the_file_ends_in_a_newline() -> None:
    old = b"ssh-rsa AAAA theirs"
    merged = merge(old, [parse_key(ONE), parse_key(TWO)])
    assert merged.content == old + b"\n" + line(ONE) + b"\n" + line(TWO) + b"\n"
    assert merged.added == (parse_key(ONE).fingerprint, parse_key(TWO).fingerprint)
    assert merged.removed == ()


def test_a_line_nobody_needs_any_more_goes() -> None:
    old = line(ONE) + b"\nssh-rsa AAAA theirs\r\n" + line(TWO) + b"\n"
    merged = merge(old, [parse_key(TWO)])
    assert merged.content == b"ssh-rsa AAAA theirs\r\n" + line(TWO) + b"\n"
    assert merged.added == ()
    assert merged.removed == (parse_key(ONE).fingerprint,)


def test_a_copy_of_the_key_added_by_hand_stays() -> None:
    by_hand = f"{key(1, 'by hand')}\n".encode()
    with_ours = merge(by_hand, [parse_key(ONE)]).content
    assert with_ours == by_hand + line(ONE) + b"\n"
    assert merge(with_ours, []).content == by_hand


def test_lines_of_the_server_and_of_shims_without_a_marker_are_not_ours() -> None:
    old = f"{ONE} # added by dstack\n{TWO}\n".encode()
    assert merge(old, []).content == old
    assert merge(merge(old, [parse_key(ONE)]).content, []).content == old


def test_the_first_comment_of_a_fingerprint_wins() -> None:
    merged = merge(b"", [parse_key(key(1, "first")), parse_key(key(1, "second"))])
    assert merged.content == line(key(1, "first")) + b"\n"
    assert len(merged.added) == 1


def test_our_own_duplicates_become_one() -> None:
    old = line(key(1, "a")) + b"\n" + line(key(1, "b")) + b"\n"
    assert merge(old, [parse_key(key(1, "b"))]).content == line(key(1, "b")) + b"\n"
    assert merge(old, []).removed == (parse_key(ONE).fingerprint,)


def test_a_marked_line_without_a_key_goes_and_is_reported() -> None:
    merged = merge(b"garbage\xff" + MARKER + b"\nkeep\n", [])
    assert merged.content == b"keep\n"
    assert merged.removed == ("unreadable",)


def test_a_file_turned_to_crlf_by_an_editor_keeps_its_lines_and_ours_are_still_ours() -> None:
    old = b"# mine\r\n" + line(ONE) + b"\r\n"
    assert marked(old) == (parse_key(ONE).fingerprint,)
    assert merge(old, []).content == b"# mine\r\n"


@pytest.mark.parametrize("old", [b"", b"\n", b"x", b"x\r\n\r\n", b"\0\xff", b"ssh-rsa AAAA y"])
def test_nothing_of_ours_and_nothing_wanted_leaves_a_file_untouched(old: bytes) -> None:
    assert merge(old, []).content == old


FOREIGN = st.one_of(
    st.binary(max_size=40).map(lambda data: data.replace(b"\n", b"")),
    st.sampled_from(
        [
            b"",
            b"\r",
            b"# added by dstack-shim",
            b"ssh-rsa AAAA x # added by dstack",
            b"ssh-rsa AAAA x # added by dstack-shim.",
            b"ssh-rsa AAAA x\t# added by dstack-shim",
            ONE.encode(),
            ONE.encode() + b"\r",
        ]
    ),
).filter(lambda text: not is_ours(text))
OURS = st.one_of(
    st.sampled_from([line(ONE), line(TWO), line(THREE), line(key(1, "other")), MARKER]),
    st.binary(max_size=10).map(lambda data: data.replace(b"\n", b"") + MARKER + b" \r"),
)
WANTED = st.lists(st.sampled_from([ONE, TWO, THREE, key(1, "other")]).map(parse_key))


@given(st.lists(st.one_of(FOREIGN, OURS)), st.booleans(), WANTED)
def test_foreign_lines_stay_byte_for_byte_and_ours_are_what_is_wanted(
    lines: list[bytes], final_newline: bool, wanted: list[PublicKey]
) -> None:
    old = b"\n".join(lines) + (b"\n" if final_newline and lines else b"")
    merged = merge(old, wanted)
    foreign = [text for text in lines if not is_ours(text)]
    if not final_newline and lines and lines[-1] == b"":
        foreign.pop()  # that was no line, only the newline of the one before
    result = merged.content.split(b"\n")
    if merged.content == old and not wanted and not marked(old):
        return
    assert result.pop() == b""
    assert result[: len(foreign)] == foreign
    assert all(map(is_ours, result[len(foreign) :]))
    wished = list(dict.fromkeys(item.fingerprint for item in wanted))
    assert list(marked(merged.content)) == wished
    assert set(merged.added) == set(wished) - set(marked(old))
    assert set(merged.removed) == set(marked(old)) - set(wished)


@given(st.binary(), WANTED)
def test_merging_twice_is_merging_once(old: bytes, wanted: list[PublicKey]) -> None:
    once = merge(old, wanted)
    again = merge(once.content, wanted)
    assert again.content == once.content
    assert (again.added, again.removed) == ((), ())


@given(st.lists(FOREIGN), WANTED)
def test_adding_and_removing_gives_back_the_file(
    lines: list[bytes], wanted: list[PublicKey]
) -> None:
    old = b"".join(text + b"\n" for text in lines)
    assert merge(merge(old, wanted).content, []).content == old
