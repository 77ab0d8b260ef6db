"""Numba's compiled code on disk, each file with its hash: one that is damaged is built anew, not loaded."""

import hashlib
import pickle
import warnings
from pathlib import Path
from typing import Any

from numba.core.caching import FunctionCache, IndexDataCacheFile

_HASH = hashlib.sha256().digest_size


class _HashedFiles(IndexDataCacheFile):
    """Numba's index and data files, whose first bytes are the hash of the rest."""

    def _load_index(self) -> dict[Any, str]:
        try:
            version, stamp, overloads = pickle.loads(_read(self._index_path))
        except OSError:  # not there, or damaged: what it named is built and named again
            return {}
        return overloads if (version, stamp) == (self._version, self._source_stamp) else {}

    def _save_index(self, overloads: dict[Any, str]) -> None:
        self._write(self._index_path, (self._version, self._source_stamp, overloads))

    def _load_data(self, name: str) -> Any:
        return pickle.loads(_read(self._data_path(name)))

    def _save_data(self, name: str, data: Any) -> None:
        self._write(self._data_path(name), data)

    def _write(self, path: str, content: Any) -> None:
        data = self._dump(content)
        with self._open_for_write(path) as file:
            file.write(hashlib.sha256(data).digest() + data)


def _read(path: str) -> bytes:
    """The content of a whole file; OSError, which Numba takes for a file that is not there, of a damaged one."""
    data = Path(path).read_bytes()
    if hashlib.sha256(data[_HASH:]).digest() != data[:_HASH]:
        raise OSError(f"{path} is damaged")
    return data[_HASH:]


class KernelCache(FunctionCache):
    """A kernel's cache. A full disk costs what it would have kept, not the call."""

    def __init__(self, function: Any) -> None:
        super().__init__(function)
        base, stamp = self._impl.filename_base, self._impl.locator.get_source_stamp()
        self._cache_file = _HashedFiles(self._cache_path, base, stamp)

    def _save_overload(self, signature: Any, data: Any) -> None:
        try:
            super()._save_overload(signature, data)
        except OSError as error:
            what = f"{self._cache_path} cannot keep compiled kernels, each process builds them: {error}"
            warnings.warn(what, stacklevel=2)
