"""Keys that an operator may choose, and the part of a key that is shown."""

from __future__ import annotations

import pytest

from cotrain_store.errors import InvalidKey
from cotrain_store.tenants.api_keys import read_chosen_keys

GOOD = "tml-Zk9d82hdk2_9sd8f"


def test_a_key_is_shown_by_its_name_or_its_beginning() -> None:
    named, unnamed = read_chosen_keys([f"ada={GOOD}", "sk-0123456789abcdef"])
    assert (named.name, named.prefix, named.api_key) == ("ada", "tml-Zk9d", GOOD)
    assert (unnamed.name, unnamed.prefix) == ("key 0123…", "sk-0123")


@pytest.mark.parametrize("key", [GOOD, "sk-" + 16 * "a", "tml-" + 16 * "a", "tml-a.b-c_d." + 8 * "x"])
def test_a_key_needs_sixteen_characters(key: str) -> None:
    assert [chosen.api_key for chosen in read_chosen_keys([key])] == [key]
    short = key[: key.index("-") + 16]
    with pytest.raises(InvalidKey, match="needs 16 characters or more"):
        read_chosen_keys([key, short])


@pytest.mark.parametrize(
    "entry", ["secret-of-ada-and-ben", "tml-", f"a b={GOOD}", f"a=b={GOOD}", "ada=", "tml-" + 323 * "a", "tml-dev"]
)
def test_a_refused_key_is_not_shown(entry: str) -> None:
    with pytest.raises(InvalidKey) as refused:
        read_chosen_keys([entry])
    assert entry.rpartition("=")[2][4:] in {"", "tml-"} or entry[4:] not in str(refused.value)


def test_a_key_is_not_part_of_its_repr() -> None:
    assert GOOD not in repr(read_chosen_keys([f"ada={GOOD}"]))
