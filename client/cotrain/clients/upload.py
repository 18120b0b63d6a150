"""Upload of an adapter that was trained elsewhere."""

import asyncio
import json
import tarfile
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from cotrain.clients.session import Session
from cotrain.errors import UnsupportedInput
from cotrain.requests.polling import wait_for_result
from cotrain.transport.responses import reader
from cotrain.wire.checkpoints import SaveWeightsResponse, UploadQuery, UploadResponse
from cotrain.wire.runs import NewRun

TENSORS = "adapter_model.safetensors"
ADAPTER_FILES = ("adapter_config.json", TENSORS)
#: Pickles, and weights in several files.
OTHER_WEIGHTS = (
    "adapter_model*.bin", "pytorch_model*.bin", "adapter_model*.pt", "adapter_model*.pth", "*.pkl",
    "*.pickle", "*.ckpt", "adapter_model-*.safetensors", "adapter_model.safetensors.index.json",
)  # fmt: skip
CHUNK_BYTES = 1024**2


async def upload_adapter(
    session: Session,
    source: Path,
    base_model: str,
    name: str,
    ttl_seconds: int | None,
    user_metadata: Mapping[str, str] | None,
    progress: Callable[[int, int], None] | None,
) -> str:
    """Send the adapter in `source` and wait until it is a checkpoint; returns its path.

    Raises OSError, UnsupportedInput, RequestFailed or APIError.
    """
    archive = archive_of(source)
    transport = session.connection.transport
    session_id, seq_id = await session.reserve_run()
    query = UploadQuery(
        base_model=base_model,
        name=name,
        session_id=session_id,
        model_seq_id=seq_id,
        ttl_seconds=ttl_seconds,
        user_metadata=json.dumps(dict(user_metadata)) if user_metadata else None,
    )
    answer = await transport.post_stream(
        "training_runs/upload", query, archive.size, lambda: archive.chunks(progress), reader(UploadResponse)
    )
    await wait_for_result(transport, answer.import_request_id, NewRun)
    await wait_for_result(transport, answer.request_id, SaveWeightsResponse)
    return answer.path


@dataclass(frozen=True)
class UploadArchive:
    """Content of an upload, in order: bytes, and files."""

    parts: tuple[bytes | Path, ...]
    size: int

    async def chunks(self, progress: Callable[[int, int], None] | None = None) -> AsyncIterator[bytes]:
        """Yield the bytes from the start; `progress` is called with the bytes sent and the total."""
        sent = 0
        for part in self.parts:
            async for chunk in _content(part):
                yield chunk
                sent += len(chunk)
                if progress:
                    progress(sent, self.size)


def archive_of(source: Path) -> UploadArchive:
    """Return an archive unchanged, or the two files of a PEFT folder as a tar.

    Raises OSError, or UnsupportedInput for weights in another form.
    """
    if not source.is_dir():
        return UploadArchive((source,), source.stat().st_size)
    _refuse_other_weights(source)
    parts: list[bytes | Path] = []
    for name in ADAPTER_FILES:
        if not (source / name).is_file():
            raise FileNotFoundError(f"{source} has no {name}: give the folder of a PEFT adapter")
        info = tarfile.TarInfo(name)
        info.size = (source / name).stat().st_size
        parts += [info.tobuf(tarfile.GNU_FORMAT), source / name, bytes(-info.size % tarfile.BLOCKSIZE)]
    parts.append(bytes(2 * tarfile.BLOCKSIZE))
    return UploadArchive(tuple(parts), sum(map(_size, parts)))


def _refuse_other_weights(folder: Path) -> None:
    if (folder / TENSORS).exists():
        return
    names = sorted(path.name for pattern in OTHER_WEIGHTS for path in folder.glob(pattern))
    if names:
        raise UnsupportedInput(
            f"Only safetensors checkpoints are accepted. {folder} holds {names[0]}: save the adapter as one {TENSORS}."
        )


def _size(part: bytes | Path) -> int:
    return part.stat().st_size if isinstance(part, Path) else len(part)


async def _content(part: bytes | Path) -> AsyncIterator[bytes]:
    if isinstance(part, bytes):
        yield part
        return
    with await asyncio.to_thread(part.open, "rb") as file:
        while chunk := await asyncio.to_thread(file.read, CHUNK_BYTES):
            yield chunk
