"""Archives of adapters: the kinds that are read, and the refusal of malicious members."""

import gzip
import io
import os
import tarfile
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typing_extensions import override

from cotrain_server.adapter_upload.archive import _Gunzip, unpack
from cotrain_server.errors import BodyTooLarge, Invalid, Unreadable
from cotrain_store.errors import Refused
from tests.support.draws import examples
from tests.support.uploads import BOMBS, CONFIG, GOOD, HOSTILE, PACKERS, TENSORS, tar

LIMIT = 64 * 1024
FORBIDDEN = "Archive contains a forbidden member"


def unpacked(archive: bytes, limit: int = LIMIT) -> dict[str, bytes]:
    files = unpack(io.BytesIO(archive), limit)
    return {CONFIG: files.config, TENSORS: files.tensors}


@pytest.mark.parametrize("archived", PACKERS.values(), ids=PACKERS)
def test_both_files_are_read_from_archives_of_every_kind(archived: Callable[[dict[str, bytes]], bytes]) -> None:
    assert unpacked(archived(GOOD)) == GOOD


@pytest.mark.parametrize("archived", PACKERS.values(), ids=PACKERS)
def test_a_surrounding_folder_and_files_of_tools_are_skipped(archived: Callable[[dict[str, bytes]], bytes]) -> None:
    extra = {"my-adapter/README.md": b"# mine", "my-adapter/checkpoint_complete": b""}
    within = {f"my-adapter/{name}": content for name, content in GOOD.items()}
    assert unpacked(archived({**extra, **within})) == GOOD


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_extended_headers_and_folders_of_usual_tools_are_accepted(form: int) -> None:
    folder = tarfile.TarInfo("./")
    folder.type = tarfile.DIRTYPE
    members = [(folder, b"")]
    for name, content in GOOD.items():
        info = tarfile.TarInfo(f"./{name}")
        info.mtime = 1.5  # not an integer: an extended header, if the format has them
        members.append((info, content))
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=form) as archive:
        for info, content in members:
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    assert unpacked(file.getvalue()) == GOOD


@pytest.mark.parametrize("archive", HOSTILE.values(), ids=HOSTILE)
def test_a_malicious_member_is_refused(archive: bytes) -> None:
    with pytest.raises(Invalid, match=FORBIDDEN):
        unpacked(archive)


@pytest.mark.parametrize(
    "name",
    [
        "pytorch_model.bin",
        "a.pkl",
        "adapter_model.bin",
        "adapter_model-00001-of-00002.safetensors",
        "adapter_model.safetensors.index.json",
    ],
)
def test_another_weight_format_without_safetensors_is_refused(name: str) -> None:
    pickled = b"\x80\x04cposix\nsystem\n"
    with pytest.raises(Invalid, match=r"Only safetensors checkpoints are accepted\."):
        unpacked(tar({f"mine/{name}": pickled, CONFIG: GOOD[CONFIG]}))
    assert unpacked(tar({f"mine/{name}": pickled, **GOOD})) == GOOD


@pytest.mark.parametrize("archived", PACKERS.values(), ids=PACKERS)
def test_a_checkpoint_of_a_trainer_is_read_without_its_other_files(
    archived: Callable[[dict[str, bytes]], bytes],
) -> None:
    others = [
        "README.md",
        "added_tokens.json",
        "chat_template.jinja",
        "merges.txt",
        "optimizer.pt",
        "rng_state.pth",
        "scheduler.pt",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "trainer_state.json",
        "training_args.bin",
        "vocab.json",
        ".gitattributes",
        "latest",
        "zero_to_fp32.py",
    ]
    files = {f"checkpoint-100/{name}": b"\x80\x04cposix\nsystem\n" for name in others}
    files |= {f"checkpoint-100/{name}": content for name, content in GOOD.items()}
    assert unpacked(archived(files), limit=256 * 1024) == GOOD


def test_too_many_members_are_refused() -> None:
    many = {f"{number}/README.md": b"" for number in range(1001)}
    with pytest.raises(Invalid, match="more than 1000 members"):
        unpacked(tar(many), limit=2**20)


def test_a_duplicate_file_is_refused() -> None:
    with pytest.raises(Invalid, match="twice"):
        unpacked(tar({**GOOD, f"again/{CONFIG}": b"{}"}))


@pytest.mark.parametrize("missing", [CONFIG, TENSORS])
def test_a_missing_file_is_named(missing: str) -> None:
    rest = {name: content for name, content in GOOD.items() if name != missing}
    with pytest.raises(Invalid, match=f"The archive has no {missing}"):
        unpacked(tar(rest))


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
def test_a_bomb_is_refused_by_its_decompressed_size(bomb: bytes) -> None:
    with pytest.raises(BodyTooLarge):
        unpacked(bomb)


def test_endless_headers_are_refused() -> None:
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.XHDTYPE, 512
    block = info.tobuf() + bytes(512)
    with pytest.raises(Invalid, match="a header that never ends"):
        unpacked(block * 4 + tar(GOOD))
    info.size = 10**9
    with pytest.raises(Invalid, match="a header that never ends"):
        unpacked(info.tobuf() + bytes(512))


class Counted(io.BytesIO):
    """File that counts its reads."""

    reads = 0

    @override
    def read(self, size: int | None = -1, /) -> bytes:
        self.reads += 1
        return super().read(size)


def test_a_gzip_with_an_endless_name_is_read_in_large_chunks() -> None:
    size = 2**20
    archive = Counted(b"\x1f\x8b\x08\x08" + bytes(6) + b"x" * size)
    with pytest.raises(Unreadable):
        unpack(archive, LIMIT)
    assert archive.reads <= size / (64 * 1024) + 4


def test_a_gzip_may_have_a_limited_number_of_members() -> None:
    whole = tar(GOOD)
    assert unpacked(gzip.compress(whole[:700]) + gzip.compress(b"") + gzip.compress(whole[700:])) == GOOD
    with pytest.raises(Invalid, match="more than 10000 members"):
        unpacked(gzip.compress(b"") * 10_001)


@pytest.mark.parametrize("size", [1, 7, 511, 2**20])
def test_a_gzip_read_in_chunks_is_complete(size: int) -> None:
    content = os.urandom(1000) + bytes(200_000) + os.urandom(1000)
    stream = _Gunzip(io.BytesIO(gzip.compress(content[:5]) + gzip.compress(content[5:])))
    assert b"".join(iter(lambda: stream.read(size), b"")) == content


@pytest.mark.parametrize("archived", PACKERS.values(), ids=PACKERS)
def test_a_truncated_archive_is_refused(archived: Callable[[dict[str, bytes]], bytes]) -> None:
    whole = archived(GOOD)
    for length in range(0, min(2000, len(whole) // 2), 97):  # tars are padded to 10 KiB
        with pytest.raises(Refused):
            unpacked(whole[:length])


def test_content_that_is_not_an_archive_is_refused() -> None:
    for content in (b"", b"\0" * 4096, b"hello" * 1000, b"PK\3\4", b"\x1f\x8b\x08", b"\x28\xb5\x2f\xfd"):
        with pytest.raises((Unreadable, Invalid)):
            unpacked(content)


@settings(max_examples=examples(150), deadline=None)
@given(
    st.sampled_from(list(PACKERS)),
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=8),
)
def test_a_damaged_archive_is_either_read_or_refused(kind: str, damage: list[tuple[int, int]]) -> None:
    content = bytearray(PACKERS[kind](GOOD))
    for index, value in damage:
        content[index % len(content)] = value
    try:
        files = unpacked(bytes(content))
    except Refused:
        return
    assert all(len(file) <= LIMIT for file in files.values())
