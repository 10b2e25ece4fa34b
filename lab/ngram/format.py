"""The file format of an n-gram table. Read this first; table.py reads such a file, and writing.py writes it.

An n-gram table answers one question: which tokens followed this context, and how often? In a table of order n the
context is the last n - 1 tokens, so a table of order 2 (bigrams) looks at one token, and order 3 (trigrams) at two.

A table is one file. All numbers are little-endian, and the file is cut into pages of 4096 bytes, as a disk is:

    header     one page: the fields below, then zeros, then the CRC-32 of the page's other bytes in its last 4 bytes
    rows       u32 [n_rows, 1 + 2K]: per context its total, K successor ids, and their K counts
    keys       u64 [n_rows], only for order 3 and more: the context that each row belongs to
    checksums  u32, one for each page of rows and keys: the page's CRC-32; here the file ends

Rows and keys each start on a new page, and zeros fill their last page.

A row:

1. The total says how often the context was seen with any successor, also with one that is not among the K.
2. The successors are sorted by count, the largest first. Those with the same count are sorted by id.
3. Where there are fewer than K, the rest have id 0 and count 0. A count of 0 always means "no successor".
4. Counts and totals stop at 2**32 - 1.

Which row belongs to a context:

- Order 2: the row number is the token's id. So n_rows is vocab_size, and a total of 0 means "never seen".
- Order 3 and more: only contexts that were seen have a row. Row i belongs to keys[i]. A key is the context written as
  one number: its ids are the digits, in base vocab_size, the oldest token first. The keys ascend and no key comes
  twice, so a binary search finds a context.

The limits: vocab_size ** order is at most 2**64, so a key and an n-gram fit in 64 bits. A row is at most one page long
(K is at most 511), so it lies on one page or on two.

The header:

    offset  type     field
    0       8 bytes  magic, 89 4E 47 52 41 4D 0D 0A ("\\x89NGRAM\\r\\n"): a copy that changed line ends has another one
    8       u32      0x01020304: read in the wrong byte order, it is another number
    12      u32      version of this format, 1
    16      u32 * 4  order, K, vocab_size, page size (4096)
    32      u64 * 6  n_rows, n_tokens (counted in the corpus), then where rows, keys, checksums and the file end...
    80      u32      length of the tokenizer's fingerprint in bytes, at most 256
    84      bytes    the fingerprint, UTF-8: ids mean nothing without the tokenizer that made them
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

import numpy as np

from lab.support.errors import BadInput

MAGIC = b"\x89NGRAM\r\n"
ORDER_MARK = 0x01020304
VERSION = 1
PAGE = 4096
PAGE_BITS = 12
MAX_ORDER = 64                    # with 2 tokens, 2**64 n-grams
MAX_TOP_K = (PAGE // 4 - 1) // 2
MAX_FINGERPRINT = 256
COUNT_MAX = 2**32 - 1
FIELDS = struct.Struct("<8sIIIIII6QI")


@dataclass(frozen=True)
class Header:
    """What a table says of itself. n_tokens: of the corpus. tokenizer: its fingerprint. All positions are in bytes."""

    order: int
    top_k: int
    vocab_size: int
    n_rows: int
    n_tokens: int
    tokenizer: str

    @property
    def row_bytes(self) -> int:
        return 4 * (1 + 2 * self.top_k)

    @property
    def keys_at(self) -> int:
        """Where the rows end and the keys start."""
        return PAGE * (1 + pages(self.n_rows * self.row_bytes))

    @property
    def sums_at(self) -> int:
        """Where the keys end and the checksums start."""
        return self.keys_at + (PAGE * pages(self.n_rows * 8) if self.order > 2 else 0)

    @property
    def size(self) -> int:
        """Of the whole file."""
        return self.sums_at + 4 * (self.sums_at // PAGE - 1)

    def pack(self) -> bytes:
        """The header page."""
        fingerprint = self.tokenizer.encode("utf-8")
        page = FIELDS.pack(MAGIC, ORDER_MARK, VERSION, self.order, self.top_k, self.vocab_size, PAGE, self.n_rows,
                           self.n_tokens, PAGE, self.keys_at, self.sums_at, self.size, len(fingerprint)) + fingerprint
        page = page.ljust(PAGE - 4, b"\0")
        return page + zlib.crc32(page).to_bytes(4, "little")

    @classmethod
    def unpack(cls, page: bytes, path) -> Header:
        """The header in the first `page` of the file `path` (less than a page where the file is shorter).

        Raises BadInput for a file that is empty, no table, in the other byte order, newer, cut off, damaged, or whose
        fields contradict one another.
        """
        if not page:
            raise BadInput(f"{path} is empty; an n-gram table has a header: build it again.")
        if page[:8] != MAGIC:
            raise BadInput(f"{path} is no n-gram table: it begins with {page[:8]!r}, a table with {MAGIC!r}.")
        if page[8:12] == struct.pack(">I", ORDER_MARK):
            raise BadInput(f"{path} was written in the other byte order; tables are little-endian: build it again.")
        version = int.from_bytes(page[12:16], "little")
        if page[8:12] == struct.pack("<I", ORDER_MARK) and version > VERSION:
            raise BadInput(f"{path} has format version {version}, newer than the {VERSION} that this program reads.")
        if len(page) < PAGE:
            raise BadInput(f"{path} is cut off in its header, after {len(page)} bytes: copy or build it again.")
        if zlib.crc32(page[:-4]) != int.from_bytes(page[-4:], "little"):
            raise BadInput(f"{path} has a damaged header (wrong checksum): copy or build it again.")
        (_, mark, _, order, top_k, vocab_size, page_size, n_rows, n_tokens, rows_at, keys_at, sums_at, size,
         length) = FIELDS.unpack_from(page)
        wrong = wrong_sizes(order, top_k, vocab_size)
        if wrong is None:
            tokenizer = page[FIELDS.size:FIELDS.size + length].decode("utf-8", "replace")
            header = cls(order, top_k, vocab_size, n_rows, n_tokens, tokenizer)
            if ((mark, version, page_size) != (ORDER_MARK, VERSION, PAGE) or length > MAX_FINGERPRINT
                    or (rows_at, keys_at, sums_at, size) != (PAGE, header.keys_at, header.sums_at, header.size)
                    or n_rows < 1 or (header.order == 2 and n_rows != header.vocab_size)):
                wrong = "fields that contradict one another"
        if wrong is not None:
            raise BadInput(f"{path} has a wrong header, {wrong}: build it again.")
        return header


def pages(n_bytes: int) -> int:
    """How many pages hold so many bytes."""
    return -(-n_bytes // PAGE)


# -- what a table must be: each function returns what is wrong, in words, or None ------------------------------


def wrong_sizes(order: int, top_k: int, vocab_size: int) -> str | None:
    """Checks the three numbers that fix a table's layout."""
    if not 2 <= order <= MAX_ORDER:
        return f"order {order}: 2 to {MAX_ORDER} would be right"
    if not 1 <= top_k <= MAX_TOP_K:
        return f"top-k {top_k}: 1 to {MAX_TOP_K} would be right"
    if not 1 <= vocab_size <= COUNT_MAX or vocab_size**order > 2**64:
        return f"a vocabulary of {vocab_size} at order {order}: at least 1 id, and vocab_size ** order at most 2**64"
    return None


def wrong_rows(rows: np.ndarray, vocab_size: int, order: int) -> str | None:
    """Checks rows (n, 1 + 2K), uint32."""
    k = rows.shape[1] // 2
    columns = np.ascontiguousarray(rows.T)      # a row is short: numpy is several times faster along a column
    totals, ids, counts = columns[0], columns[1:1 + k], columns[1 + k:]
    if ids.size and int(ids.max()) >= vocab_size:
        return f"an id of {int(ids.max())} in a vocabulary of {vocab_size}"
    if (counts[1:] > counts[:-1]).any():
        return "counts that do not descend"
    if ((counts[1:] == counts[:-1]) & (ids[1:] <= ids[:-1]) & (counts[1:] > 0)).any():
        return "equal counts whose ids do not ascend"
    if ((counts == 0) & (ids > 0)).any():
        return "an id with a count of 0"
    if (totals < np.minimum(counts.sum(axis=0, dtype=np.uint64), COUNT_MAX)).any():
        return "a total below the sum of its counts"
    if ((totals > 0) & (counts[0] == 0)).any() or (order > 2 and not totals.all()):
        return "a context without a successor"
    return None


def wrong_keys(keys: np.ndarray, last: int, vocab_size: int, order: int) -> str | None:
    """Checks keys (n,), uint64, that come after the key `last` (-1: they are the first)."""
    if len(keys) and (int(keys[0]) <= last or (keys[1:] <= keys[:-1]).any()):
        return "keys that do not ascend"
    if len(keys) and int(keys[-1]) >= vocab_size ** (order - 1):
        return f"a key of {int(keys[-1])} in a vocabulary of {vocab_size}"
    return None


def wrong_part(keys, rows, order: int, top_k: int) -> str | None:
    """Checks the types and shapes of rows and their keys, as a writer is given them."""
    if rows.dtype != np.uint32 or rows.ndim != 2 or rows.shape[1] != 1 + 2 * top_k:
        return f"rows of shape {rows.shape} and type {rows.dtype}"
    if order == 2 and keys is not None:
        return "keys"
    if order > 2 and (keys is None or keys.dtype != np.uint64 or keys.shape != rows.shape[:1]):
        return f"keys of shape {np.shape(keys)} and type {getattr(keys, 'dtype', None)}"
    return None
