"""Tests that each error message of Atoll has an entry in the reference."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs import messages_page
from docs.error_messages import ErrorMessage, messages, unresolved
from docs.messages_page import AREAS, UnlistedFileError, anchors, area_of, headings, quotes

# The files with this name read the messages of the source once.
pytestmark = pytest.mark.together("messages")

# Messages on the page of troubleshooting that JAX, jaxlib or TensorFlow make, or that are notices and not errors.
OTHERS = {
    "INVALID_ARGUMENT: Received incompatible devices for jitted computation",
    "UNAVAILABLE: Connection to IFRT proxy server was terminated",
    "InvalidArgumentError: XLA cannot compile the op ...",
    "Invalid platform 'atoll'",
    "Backend 'atoll' is not in the list of known backends",
    "RecursionError: Recursively calling",
    "W1129 ... rpc_helper.cc:436] loaded_executable_fetch_execute_result: ...",
    "... has run on host 1 of island 0 for 61 s: the worker of host 1 has not reported its end",
    "the compilation of function 60 has taken 62 s: the worker of host 1 has not sent the result",
    "a launch has waited for bytes on island 0 for 65 s: its client has not sent the bytes",
}
# Texts that are put together from more than one error.
COMPOSED = {
    "cannot reach the Atoll controller at ...",
    "uses TLS, and this side does not",
    "DATA_LOSS: ... the worker of host 1 failed: TypeError: ... (worker/completion_reporter.py:42)",
}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("raise invalid(f'{x} is not a sum')", [("... is not a sum", "INVALID_ARGUMENT")]),
        ("raise invalid(f'{counted(x, 'sum')} fail')", [("... sums fail", "INVALID_ARGUMENT")]),
        ("return Status(Code.ABORTED, 'the run ended')", [("the run ended", "ABORTED")]),
        ("text = 'the run ended'; return failed(Code.DATA_LOSS, text, d)", [("the run ended", "DATA_LOSS")]),
        ("self._refuse(peer, Code.NOT_FOUND, f'no sum {x}')", [("no sum ...", "NOT_FOUND")]),
        ("raise ClusterError(_TEXT)", [("no cluster is up", "ClusterError")]),
        ("raise ClusterError(f'{no_text(x)}')", [("no sum is ...", "ClusterError")]),
        (
            "raise SliceError('a slice ended' if x else 'a slice is full')",
            [("a slice ended", "SliceError"), ("a slice is full", "SliceError")],
        ),
        ("raise typer.BadParameter('--x: expected a number')", [("--x: expected a number", "invalid option")]),
        (
            "raise violation(m, 'sum', m.sum, f'at most {x}')",
            [("sum is ...: expected at most ...", "INVALID_ARGUMENT")],
        ),
        ("raise invalid(x or 'the sum is lost')", [("the sum is lost", "INVALID_ARGUMENT")]),
        ("raise invalid(shortened(f'no sum {x}'))", [("no sum ...", "INVALID_ARGUMENT")]),
        ("self.send(int(Code.ABORTED), 'the sum is lost')", []),
        ("raise StatusError(Code(e.code), e.message)", []),
        ("raise invalid('units.hosts')", []),
        ("print(ValueError('is not raised'))", []),
    ],
)
def test_an_error_of_the_source_is_found(tmp_path: Path, source: str, expected: list[tuple[str, str]]) -> None:
    helper = "def no_text(x):\n    return f'no sum is {x}'\n"
    (tmp_path / "new.py").write_text(f"_TEXT = 'no cluster is up'\n{helper}def f(x):\n    {source}\n")
    assert messages(tmp_path) == tuple(ErrorMessage(text, kind, "new.py") for text, kind in expected)


def test_a_text_that_callers_pass_is_found(tmp_path: Path) -> None:
    (tmp_path / "new.py").write_text(
        "def refuse(text):\n    raise invalid(text)\n"
        "def f(x):\n    refuse(f'no sum {x}')\n    refuse(text='no product')\n"
    )
    assert [each.text for each in messages(tmp_path)] == ["no product", "no sum ..."]


def test_of_two_functions_with_one_name_the_imported_one_makes_the_text(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.py").write_text(f"def text_of(x):\n    return f'no sum {name}'\n")
    (tmp_path / "new.py").write_text("from atoll.b import text_of\ndef f(x):\n    raise invalid(text_of(x))\n")
    assert [each.text for each in messages(tmp_path)] == ["no sum b"]


def test_the_texts_of_almost_all_errors_can_be_read() -> None:
    """Make an error where its text is. The reader does not follow a text through several modules."""
    assert len(unresolved()) < 20, "\n".join(unresolved())


def test_an_error_whose_text_is_not_in_the_source_is_listed(tmp_path: Path) -> None:
    (tmp_path / "new.py").write_text("def f(x):\n    raise invalid(x)\ndef g(e):\n    raise invalid(e.message)\n")
    assert unresolved(tmp_path) == ("new.py:2 invalid(x)",)


def test_an_error_in_a_new_package_needs_an_area() -> None:
    with pytest.raises(UnlistedFileError, match="add it"):
        area_of("new/package.py")


def test_each_prefix_of_an_area_has_errors() -> None:
    files = {each.file for each in messages()}
    used = {max((p for _, ps, *_ in AREAS for p in ps if file.startswith(p)), key=len) for file in files}
    assert {prefix for _, prefixes, *_ in AREAS for prefix in prefixes} - used == set()


def test_each_message_has_one_anchor() -> None:
    texts = sorted({each.text for each in messages()})
    found = re.findall(r'^\| <a id="([^"]+)"', messages_page.PAGE.read_text(), re.MULTILINE)
    assert sorted(found) == sorted(anchors(texts).values())
    assert len(set(found)) == len(texts)


def test_an_anchor_stays_if_another_message_is_added() -> None:
    texts = [f"message {name} of the cluster" for name in ("one", "three")]
    assert anchors(texts).items() <= anchors([*texts, "message two of the cluster"]).items()


def test_the_page_of_troubleshooting_quotes_messages_of_the_source() -> None:
    texts = {each.text for each in messages()}
    quoted = {each for found in headings().values() for each in found if not each.startswith("atoll ")}
    unknown = {each for each in quoted if not any(quotes(each, text) for text in texts)}
    assert unknown == OTHERS | COMPOSED


def test_a_quoted_message_may_have_example_values() -> None:
    text = "the island ... of platform ... cannot run: ..."
    assert quotes("the island 3 of platform cuda cannot run", text)
    assert quotes("UNAVAILABLE: the island ... of platform cuda cannot run: no device", text)
    assert not quotes("the island 3 of platform cuda does not run", text)
