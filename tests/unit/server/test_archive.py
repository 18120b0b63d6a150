from __future__ import annotations

import io
import tarfile
import zipfile
from typing import TYPE_CHECKING

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from cotrain_server.archive import unpack
from cotrain_server.errors import BodyTooLarge, Invalid, RequestError, Unreadable
from tests.support.uploads import CONFIG, TENSORS, adapter, tar, tar_of, zipped

if TYPE_CHECKING:
    from collections.abc import Callable

LIMIT = 64 * 1024
GOOD = adapter()
FORBIDDEN = "Archive contains a forbidden member"


def unpacked(archive: bytes, limit: int = LIMIT) -> dict[str, bytes]:
    files = unpack(io.BytesIO(archive), limit)
    return {CONFIG: files.config, TENSORS: files.tensors}


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", size: int = 0) -> bytes:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, link, size
    good = [(tarfile.TarInfo(each), content) for each, content in GOOD.items()]
    return tar_of([(info, b"x" * size), *good])


PACKERS: dict[str, Callable[[dict[str, bytes]], bytes]] = {
    "tar": tar,
    "tar.gz": lambda files: tar(files, "w:gz"),
    "tar.zst": lambda files: zstandard.ZstdCompressor().compress(tar(files)),
    "tar.zst of two frames": lambda files: b"".join(
        zstandard.ZstdCompressor().compress(half) for half in (tar(files)[:700], tar(files)[700:])
    ),
    "stored zip": zipped,
    "deflated zip": lambda files: zipped(files, compression=zipfile.ZIP_DEFLATED),
}


@pytest.mark.parametrize("pack", PACKERS.values(), ids=PACKERS)
def test_both_files_are_read_from_archives_of_every_kind(
    pack: Callable[[dict[str, bytes]], bytes],
) -> None:
    assert unpacked(pack(GOOD)) == GOOD


@pytest.mark.parametrize("pack", PACKERS.values(), ids=PACKERS)
def test_a_folder_around_them_and_what_tools_put_beside_them_are_skipped(
    pack: Callable[[dict[str, bytes]], bytes],
) -> None:
    beside = {"my-adapter/README.md": b"# mine", "my-adapter/checkpoint_complete": b""}
    within = {f"my-adapter/{name}": content for name, content in GOOD.items()}
    assert unpacked(pack({**beside, **within})) == GOOD


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_extended_headers_and_folders_of_ordinary_tools_are_no_obstacle(form: int) -> None:
    folder = tarfile.TarInfo("./")
    folder.type = tarfile.DIRTYPE
    members = [(folder, b"")]
    for name, content in GOOD.items():
        info = tarfile.TarInfo(f"./{name}")
        info.mtime = 1.5  # not a whole number: an extended header, where there are such
        members.append((info, content))
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=form) as archive:
        for info, content in members:
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    assert unpacked(file.getvalue()) == GOOD


HOSTILE = {
    "parent": member("../adapter_config.json"),
    "parent inside": member("a/../../x/README.md"),
    "absolute": member("/etc/adapter_config.json"),
    "other name": member("evil.sh", size=3),
    "hidden": member(".README.md", size=3),
    "symbolic link": member("README.md", tarfile.SYMTYPE, "/etc/passwd"),
    "hard link": member("README.md", tarfile.LNKTYPE, "/etc/passwd"),
    "device": member("README.md", tarfile.CHRTYPE),
    "fifo": member("README.md", tarfile.FIFOTYPE),
    "sparse": member("README.md", tarfile.GNUTYPE_SPARSE),
    "folder of the parent": member("..", tarfile.DIRTYPE),
    "back slash": member("..\\README.md", size=3),
    "zip parent": zipped({"../README.md": b"x", **GOOD}),
    "zip absolute": zipped({"/README.md": b"x", **GOOD}),
    "zip other name": zipped({"adapter.py": b"x", **GOOD}),
    "zip bzip2": zipped(GOOD, compression=zipfile.ZIP_BZIP2),
    "zip lzma": zipped(GOOD, compression=zipfile.ZIP_LZMA),
}


@pytest.mark.parametrize("archive", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_member_is_refused(archive: bytes) -> None:
    with pytest.raises(Invalid, match=FORBIDDEN):
        unpacked(archive)


@pytest.mark.parametrize("flag", ["link", "encrypted"])
def test_a_hostile_member_of_a_zip_is_refused(flag: str) -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        info = zipfile.ZipInfo(CONFIG)
        info.external_attr = 0o120777 << 16 if flag == "link" else 0
        archive.writestr(info, b"{}")
    content = bytearray(file.getvalue())
    if flag == "encrypted":
        content[content.rindex(b"PK\1\2") + 8] |= 1
    with pytest.raises(Invalid, match=FORBIDDEN):
        unpacked(bytes(content))


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "optimizer.pt", "a.pkl", "adapter_model.bin"]
)
@pytest.mark.parametrize("pack", [tar, zipped])
def test_pickles_are_refused_before_anything_is_read_of_them(
    pack: Callable[[dict[str, bytes]], bytes], name: str
) -> None:
    with pytest.raises(Invalid, match="Only safetensors checkpoints are accepted"):
        unpacked(pack({name: b"\x80\x04cposix\nsystem\n", **GOOD}))


@pytest.mark.parametrize("pack", [tar, zipped])
def test_too_many_members_are_refused(pack: Callable[[dict[str, bytes]], bytes]) -> None:
    many = {f"{number}/README.md": b"" for number in range(17)}
    with pytest.raises(Invalid, match="more than 16 members"):
        unpacked(pack(many))


def test_a_zip_with_an_endless_list_of_members_is_refused_before_the_list_is_read() -> None:
    archive = zipped({f"{number}/": b"" for number in range(3000)})
    with pytest.raises(Unreadable):
        unpacked(archive)


@pytest.mark.parametrize("pack", [tar, zipped])
def test_a_file_that_is_there_twice_is_refused(pack: Callable[[dict[str, bytes]], bytes]) -> None:
    with pytest.raises(Invalid, match="twice"):
        unpacked(pack({**GOOD, f"again/{CONFIG}": b"{}"}))


@pytest.mark.parametrize("pack", [tar, zipped])
@pytest.mark.parametrize("missing", [CONFIG, TENSORS])
def test_a_file_that_is_missing_is_named(
    pack: Callable[[dict[str, bytes]], bytes], missing: str
) -> None:
    rest = {name: content for name, content in GOOD.items() if name != missing}
    with pytest.raises(Invalid, match=f"The archive has no {missing}"):
        unpacked(pack(rest))


BOMBS: dict[str, Callable[[], bytes]] = {
    "gzip": lambda: tar({**GOOD, TENSORS: bytes(2**24)}, "w:gz"),
    "gzip in a skipped file": lambda: tar({"README.md": bytes(2**24), **GOOD}, "w:gz"),
    "zstd with its size declared": lambda: zstandard.ZstdCompressor().compress(
        tar({TENSORS: bytes(2**24)})
    ),
    "zstd without": lambda: zstandard.ZstdCompressor(write_content_size=False).compress(
        tar({TENSORS: bytes(2**24)})
    ),
    "deflate": lambda: zipped(
        {TENSORS: bytes(2**24)}, compression=zipfile.ZIP_DEFLATED, compresslevel=9
    ),
    "plain": lambda: tar({TENSORS: bytes(2**17)}),
    "configuration": lambda: zipped({CONFIG: bytes(2**21)}, compression=zipfile.ZIP_DEFLATED),
}


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
def test_a_bomb_is_refused_by_what_comes_out_of_it(bomb: Callable[[], bytes]) -> None:
    with pytest.raises(BodyTooLarge):
        unpacked(bomb())


def test_a_zstd_frame_that_asks_for_too_much_memory_is_refused() -> None:
    wide = zstandard.ZstdCompressionParameters(window_log=27, write_content_size=False)
    stream = zstandard.ZstdCompressor(compression_params=wide).compressobj()
    with pytest.raises(Unreadable):
        unpacked(stream.compress(tar(GOOD)) + stream.flush())


def test_headers_that_never_end_are_refused() -> None:
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.XHDTYPE, 512
    block = info.tobuf() + bytes(512)
    with pytest.raises(Invalid, match="a header that never ends"):
        unpacked(block * 4 + tar(GOOD))
    info.size = 10**9
    with pytest.raises(Invalid, match="a header that never ends"):
        unpacked(info.tobuf() + bytes(512))


@pytest.mark.parametrize("pack", PACKERS.values(), ids=PACKERS)
def test_a_truncated_archive_is_refused(pack: Callable[[dict[str, bytes]], bytes]) -> None:
    whole = pack(GOOD)
    for length in range(0, min(2000, len(whole) // 2), 97):  # tars are padded to 10 KiB
        with pytest.raises(RequestError):
            unpacked(whole[:length])


def test_what_is_no_archive_is_refused() -> None:
    for content in (
        b"",
        b"\0" * 4096,
        b"hello" * 1000,
        b"PK\3\4",
        b"\x1f\x8b\x08",
        b"\x28\xb5\x2f\xfd",
    ):
        with pytest.raises((Unreadable, Invalid)):
            unpacked(content)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(list(PACKERS)),
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=8),
)
def test_a_damaged_archive_is_read_or_refused_and_never_anything_else(
    kind: str, damage: list[tuple[int, int]]
) -> None:
    content = bytearray(PACKERS[kind](GOOD))
    for place, value in damage:
        content[place % len(content)] = value
    try:
        files = unpacked(bytes(content))
    except RequestError:
        return
    assert all(len(file) <= LIMIT for file in files.values())
