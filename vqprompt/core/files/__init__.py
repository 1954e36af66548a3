"""Files on disk: read only if regular, written whole or not at all, locked, and kept in a private cache."""

from vqprompt.core.files.atomic import (
    delete_abandoned,
    partial_path,
    replacing,
    save_tensors,
    write_atomically,
    writing,
)
from vqprompt.core.files.cache import (
    cache_folder,
    keep_array,
    load_array,
    replacing_cached,
    save_array,
    sealed_length,
    temporary_file,
    warn_no_cache,
)
from vqprompt.core.files.locks import InUseError, lock_file, lock_folder
from vqprompt.core.files.regular import (
    exists,
    is_file,
    open_regular,
    read_at,
    read_json,
    read_regular,
    read_text,
    sha256_of,
    write_at,
)

__all__ = [
    "InUseError", "cache_folder", "delete_abandoned", "exists", "is_file", "keep_array", "load_array", "lock_file",
    "lock_folder", "open_regular", "partial_path", "read_at", "read_json", "read_regular", "read_text", "replacing",
    "replacing_cached", "save_array", "save_tensors", "sealed_length", "sha256_of", "temporary_file", "warn_no_cache",
    "write_at", "write_atomically", "writing",
]  # fmt: skip
