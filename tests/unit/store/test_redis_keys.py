from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any, get_args, get_origin, get_type_hints

from cotrain_store import redis_keys
from cotrain_store.messages.ids import PoolId
from cotrain_store.oplog.commit_rows import Commit
from cotrain_store.oplog.intake import Submission
from cotrain_store.redis_client.scripts import SCRIPTS, source
from cotrain_store.sampling.intake import SampleSubmission

ALL_SCRIPTS = sorted(SCRIPTS.rglob("*.lua"))
ARGUMENTS: dict[str, type[Any]] = {"submit": Submission, "sample_submit": SampleSubmission, "commit": Commit}


def makers() -> list[tuple[Callable[..., str], list[str]]]:
    """Return every key template, with the types of its arguments."""
    return [
        (getattr(redis_keys, name), [given.__name__ for given in get_args(hint)[0]])
        for name, hint in get_type_hints(redis_keys).items()
        if get_origin(hint) is Callable and name != "hash_tag"  # part of a key
    ]


def test_all_keys_of_a_pool_share_its_hash_tag() -> None:
    of_pool = [(maker, types) for maker, types in makers() if "PoolId" in types]
    assert len(of_pool) > 30
    for maker, types in of_pool:
        key = maker(*("p" if name == "PoolId" else "x" for name in types))
        assert key.startswith("cotrain:{p}:")


def pattern(key: str) -> str:
    """Write a key with `*` for each filled-in part. A part may have several values, such as `<run>:<seq>`."""
    return re.sub(r"\*([:/]\*)+", "*", key)


def made_here() -> set[str]:
    return {pattern(maker(*("*" for _ in types))) for maker, types in makers()}


#: A string in Lua that is concatenated from literals and other parts, starting with a key or its prefix.
_BUILT = re.compile(
    r"(?P<start>prefix \.\. '|'\^?cotrain:)(?P<literal>[^']*)'(?P<rest>(?:\s*\.\.\s*(?:'[^']*'|[\w.]+(?:\[\w+\])?))*)"
)
_PART = re.compile(r"\.\.\s*(?:'([^']*)'|[\w.]+(?:\[\w+\])?)")


def built_in(text: str) -> set[str]:
    found = set()
    for match in _BUILT.finditer(text):
        start = redis_keys.prefix(PoolId("*")) if match["start"][0] == "p" else "cotrain:"
        rest = "".join("*" if part is None else part for part in _parts(match["rest"]))
        filled_in = "*" if match["start"] == "'^cotrain:" else ""  # a pattern: anything may follow
        found.add(pattern(start + match["literal"] + rest + filled_in))
    return found


def _parts(text: str) -> list[str | None]:
    return [match[1] for match in _PART.finditer(text)]


def test_keys_are_found_in_a_script() -> None:
    text = """
    local a = 'cotrain:tenant:' .. tenant .. ':owed'
    redis.call('GET', prefix .. 'log:' .. run, string.match(key, '^cotrain:result:'))
    redis.call('GET', 'cotrain:clock', 'cotrain:weights:' .. args.run .. ':' .. row[1])
    """
    assert built_in(text) == {
        "cotrain:tenant:*:owed", "cotrain:{*}:log:*", "cotrain:result:*", "cotrain:clock",
        "cotrain:weights:*",
    }  # fmt: skip


def test_the_scripts_build_only_keys_that_python_defines() -> None:
    known = made_here() | {"cotrain:*"}  # before a hash tag
    built = {script.name: built_in(script.read_text()) for script in ALL_SCRIPTS}
    assert len(set().union(*built.values())) > 40
    assert {name: keys - known for name, keys in built.items() if keys - known} == {}


def test_a_script_reads_exactly_the_arguments_that_it_gets() -> None:
    for name, record in ARGUMENTS.items():
        read = set(re.findall(r"\bargs\.(\w+)", source(name)))
        assert read == {field.name for field in dataclasses.fields(record)}, name


def test_no_script_negates_a_number_in_an_argument() -> None:
    for script in ALL_SCRIPTS:
        assert not re.search(r", -tonumber", script.read_text()), script.name
