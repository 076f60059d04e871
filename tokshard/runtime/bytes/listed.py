"""Lists of document ids, converted to the file of numbers that a mask reads."""

from __future__ import annotations

import hashlib
import os
import warnings

from tokshard.errors import PlanError, UsageError
from tokshard.format.corpus import Corpus
from tokshard.format.document_list import find_listed
from tokshard.store import Store, absolute_location, locate, present
from tokshard.wording import counted, one_line


def numbers_of_list(corpus: Corpus, name: str, ids_file: str | os.PathLike[str]) -> str | None:
    """The file of the numbers of the documents that a list names; None if it names none.

    The file lies beside the list. Its name has a hash of the list and of the content of the corpus. The first call
    makes it, which costs 4 us for each document of the corpus, and warns of rows that name no document. Later calls
    find it. Calls side by side write the same bytes.

    Args:
        name: of the corpus in the plan, for messages.
        ids_file: as `read_document_list` takes it.

    Raises:
        PlanError: the list cannot be read, changes meanwhile, or its directory is not writable.
        CorpusError: the corpus cannot be read.
    """
    location = absolute_location(ids_file)
    store, list_name = locate(location)
    try:
        before = _hash(store, list_name)
    except OSError as error:
        raise PlanError(f"{location} cannot be read: {error.strerror or error}", hint="give a list of ids") from error
    try:
        key = hashlib.sha256(f"{corpus.fingerprint} {before}".encode()).hexdigest()[:16]
        file = f"{list_name}.{key}.numbers"
        if file not in present(store):
            found = find_listed(corpus, location)
            if _hash(store, list_name) != before:
                raise PlanError(f"{location} changed while it was read", hint="call mask again when it is complete")
            store.put(file, "".join(f"{number}\n" for number in found.documents.tolist()).encode())
            if found.num_missing:
                verb, more = "names" if found.num_missing == 1 else "name", len(found.missing) < found.num_missing
                warnings.warn(
                    f"{counted(found.num_missing, 'row')} of {location} {verb} no document of corpus {name!r}: "
                    f"{', '.join(map(one_line, found.missing))}{', ...' * more}",
                    stacklevel=2,
                )
        return store.where(file) if store.stat(file).size else None
    except UsageError as error:
        raise PlanError(error.problem, hint=error.hint) from error
    except OSError as error:
        raise PlanError(
            f"the document numbers of {location} cannot be written next to it: {error.strerror or error}",
            hint="write them elsewhere with tokshard scan CORPUS --ids FILE --numbers OUT, and mask OUT",
        ) from error


def _hash(store: Store, name: str) -> str:
    store.stat(name)  # refuses what is no file, which might never end
    digest = hashlib.sha256()
    with store.open(name) as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()
