"""Order in which test files run."""

from __future__ import annotations

from tests.conftest import turns_of

FILES = (
    "tests/conformance/test_cli.py",
    "tests/faults/test_random.py",
    "tests/integration/test_ages.py",
    "tests/unit/test_docs.py",
    "tests/unit/test_rooms.py",
    "tests/unit/test_warm.py",
    "tests/unit/test_words.py",
)


def test_computing_and_waiting_files_are_interleaved_in_their_order() -> None:
    turns = turns_of(FILES)
    assert sorted(FILES, key=turns.__getitem__) == [
        "tests/conformance/test_cli.py",
        "tests/faults/test_random.py",
        "tests/unit/test_docs.py",
        "tests/unit/test_rooms.py",
        "tests/integration/test_ages.py",
        "tests/unit/test_warm.py",
        "tests/unit/test_words.py",
    ]
