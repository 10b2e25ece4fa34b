"""Files that are there whole or not at all: written under a temporary name and renamed."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lab.support.errors import BadInput


@contextmanager
def replacing(path) -> Iterator[Path]:
    """The name of a temporary file in the same folder, which takes the place of `path` when the block ends well.

    By then its bytes are on the disk. A symbolic link stays, and what it points to is replaced. A process that is
    killed leaves a file beside it whose name ends in .part. Raises OSError.
    """
    path = Path(os.path.realpath(path))
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name + ".", suffix=".part")
    os.close(handle)
    try:
        yield Path(name)
        with open(name, "rb+") as written:
            os.fsync(written.fileno())
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)  # mkstemp makes the file private
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
    if hasattr(os, "O_DIRECTORY"):  # the new name, too, outlives a power cut
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        with suppress(OSError):  # not every file system can; the file is there all the same
            os.fsync(folder)
        os.close(folder)


def write_bytes(path, data: bytes) -> None:
    """Write a file, so that it is there whole or not at all. Raises OSError."""
    with replacing(path) as temporary:
        temporary.write_bytes(data)


def write_text(path, text: str) -> None:
    """Write a text file in UTF-8, so that it is there whole or not at all. Raises OSError."""
    write_bytes(path, text.encode("utf-8"))


def writable(flag: str, name: str) -> Path:
    """Path `name`, absolute and with ~ written out, if write_bytes can write there; BadInput for a folder, say."""
    path = Path(name).expanduser()
    try:
        if path.exists() and not path.is_file():
            raise BadInput(f'{flag} cannot write "{path}", which is no regular file: give the name of a file')
        target = Path(os.path.realpath(path))
        # Only trying tells: root may write into /proc by its mode, and still cannot.
        tempfile.NamedTemporaryFile(dir=target.parent, prefix=target.name + ".").close()
    except OSError as error:
        raise BadInput(f'{flag} cannot write "{path}" ({error.strerror}): give the name of a file in a '
                       "folder that exists and that you may write to") from None
    return path.absolute()


def writable_folder(path: Path, name: str) -> Path:
    """`path`, made if need be; BadInput that says to set `name`, a flag or a variable, where that cannot be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise BadInput(f'files cannot be written to "{path}" ({reason(error)}): set {name} to a folder that you may '
                       "write to") from None
    return path


def reason(error: OSError) -> str:
    """What went wrong, in the system's words; a file where a folder should be is "Not a directory"."""
    return "Not a directory" if isinstance(error, FileExistsError) else error.strerror or str(error)
