"""Adapters and archives that tenants upload: valid and malicious ones."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

PREFIX = "base_model.model.model.layers.0.self_attn.q_proj"
CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"


def config(**changes: Any) -> bytes:
    """Return the config that PEFT writes for an adapter of rank 4 on q_proj."""
    plain = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    return json.dumps({**plain, **changes}).encode()


def safetensors(shape_by_name: Mapping[str, Sequence[int]], dtype: str = "F32") -> bytes:
    """Return a file with tensors of these shapes and small random values, written without a library."""
    header, blobs, end = {}, [], 0
    for number, (name, shape) in enumerate(shape_by_name.items()):
        values = np.random.default_rng(number).normal(0, 0.1, shape)
        blob = values.astype("<f4" if dtype == "F32" else "<f2").tobytes()
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + len(blob)]}
        blobs.append(blob)
        end += len(blob)
    return raw_safetensors(json.dumps(header).encode(), b"".join(blobs))


def raw_safetensors(header: bytes, content: bytes = b"") -> bytes:
    """Return a file with a header of any bytes, followed by its content."""
    return len(header).to_bytes(8, "little") + header + content


def q_proj(rank: int = 4, inputs: int = 6, outputs: int = 10, **changes: Any) -> bytes:
    """Return a file with the two matrices of an adapter on one q_proj."""
    shapes = {f"{PREFIX}.lora_A.weight": (rank, inputs), f"{PREFIX}.lora_B.weight": (outputs, rank)}
    return safetensors(shapes, **changes)


def tar(members: Mapping[str, bytes], mode: str = "w") -> bytes:
    """Return a tar, or with `w:gz` a compressed one."""
    return tar_of([(tarfile.TarInfo(name), content) for name, content in members.items()], mode)


def tar_of(members: Sequence[tuple[tarfile.TarInfo, bytes]], mode: str = "w") -> bytes:
    """Return a tar with exactly these headers."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode=mode) as archive:  # type: ignore[call-overload]
        for info, content in members:
            info.size = info.size or len(content)
            archive.addfile(info, io.BytesIO(content))
    return file.getvalue()


def adapter(**changes: bytes) -> dict[str, bytes]:
    """Return the two files of a valid adapter."""
    return {CONFIG: config(), TENSORS: q_proj(), **changes}


GOOD = adapter()


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", size: int = 0) -> bytes:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, link, size
    good = [(tarfile.TarInfo(each), content) for each, content in GOOD.items()]
    return tar_of([(info, b"x" * size), *good])


#: A way to pack files -> how.
PACKERS: dict[str, Callable[[dict[str, bytes]], bytes]] = {"tar": tar, "tar.gz": lambda files: tar(files, "w:gz")}


HOSTILE = {
    "parent": member("../adapter_config.json"),
    "parent inside": member("a/../../x/README.md"),
    "absolute": member("/etc/adapter_config.json"),
    "symbolic link": member("README.md", tarfile.SYMTYPE, "/etc/passwd"),
    "hard link": member("README.md", tarfile.LNKTYPE, "/etc/passwd"),
    "device": member("README.md", tarfile.CHRTYPE),
    "fifo": member("README.md", tarfile.FIFOTYPE),
    "sparse": member("README.md", tarfile.GNUTYPE_SPARSE),
    "folder of the parent": member("..", tarfile.DIRTYPE),
    "back slash": member("..\\README.md", size=3),
}


BOMBS = {
    "gzip": tar({**GOOD, TENSORS: bytes(2**24)}, "w:gz"),
    "gzip in a skipped file": tar({"README.md": bytes(2**24), **GOOD}, "w:gz"),
    "plain": tar({TENSORS: bytes(2**17)}),
    "configuration": tar({CONFIG: bytes(2**21)}, "w:gz"),
}
