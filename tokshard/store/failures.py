"""The meaning of a failed request: try again, the file is missing, or a problem with its next step. Pure."""

from __future__ import annotations

import errno
import os
import re

from obstore.exceptions import (
    BaseError,
    InvalidPathError,
    NotSupportedError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnknownConfigurationKeyError,
)

from tokshard.errors import StoreError, UsageError
from tokshard.wording import counted

FAILURES = (BaseError, OSError, ValueError, NotImplementedError)
"""All errors that obstore raises."""

_STATUS = re.compile(r"status code: (\d{3})([A-Za-z ]*)")
_CODE = re.compile(r"<Code>(.*?)</Code>\s*(?:<Message>(.*?)</Message>)?", re.DOTALL)
_CAUSE = re.compile(r'(?:message|error): "([^"]+)"')
_TLS = re.compile(r"Invalid(Certificate|Message)\((?:\s*Other\(\s*OtherError\()?\s*(\w+)")
_NO_BUCKET = re.compile(r"NoSuchBucket|ContainerNotFound|bucket does not exist")
_EXPIRED = re.compile(r"Expired|InvalidToken|TokenRefreshRequired|InvalidAccessKeyId|InvalidIdentityToken")
_DENIED_KEY = "(code: AccessDenied)"
"""Said of one key, in an answer to a request that removes many: its status is 200."""
_TRY_AGAIN = frozenset({408, 425, 429})
_METADATA = ("169.254.169.254", "169.254.170.", "metadata.google")
"""Addresses that a machine in a cloud asks for its credentials, after looking everywhere else."""

CREDENTIALS = {
    "s3": "check AWS_ACCESS_KEY_ID with its secret, AWS_PROFILE, or the role of this machine, and AWS_REGION; "
    "AWS_SKIP_SIGNATURE=true reads public buckets. Without the permission to list, a missing file looks like this too",
    "gs": "check GOOGLE_APPLICATION_CREDENTIALS or 'gcloud auth application-default login'; "
    "GOOGLE_SKIP_SIGNATURE=true reads public buckets",
    "az": "check AZURE_STORAGE_ACCOUNT, and AZURE_STORAGE_KEY or the identity of this machine; "
    "AZURE_SKIP_SIGNATURE=true reads public containers",
}
CONDITIONS = (
    "build into a directory, and copy its files there; builds into a store exclude each other by conditional writes "
    "(If-None-Match and If-Match), which S3, GCS, Azure and most stores that speak S3 have"
)
"""What to do with a store that lacks them."""

_NO_CREDENTIALS = "the server asks for a login: download the file"


def status_of(error: Exception) -> int | None:
    """The HTTP status of the answer; None if there was no answer."""
    found = _STATUS.search(str(error))
    return int(found[1]) if found else None


def is_refusal(error: Exception) -> bool:
    """Whether the store does not let this process in. S3 says 400 to a token that expired, without a word to HEAD."""
    if _is_denied(error):
        return True
    code = _CODE.search(str(error))
    return status_of(error) == 400 and (code is None or _EXPIRED.search(code[1]) is not None)


def _is_denied(error: Exception) -> bool:
    is_said = status_of(error) in (401, 403) or _DENIED_KEY in str(error)
    return is_said or isinstance(error, PermissionDeniedError | UnauthenticatedError | PermissionError)


def reason(error: Exception) -> str:
    """An error of obstore in a few words; its own message runs over twenty lines."""
    text = str(error)
    status, code = _STATUS.search(text), _CODE.search(text)
    if status:
        words = [f"{status[1]}{status[2].rstrip()}"]
        if code:
            words.append(f"{code[1]}: {code[2]}" if code[2] else code[1])
        return ", ".join(words)
    if "TimedOut" in text:
        return "no answer in time"
    if "IncompleteMessage" in text or "ConnectionReset" in text:
        return "the connection was closed before the answer had come"
    if tls := _TLS.search(text):
        is_known = tls[1] == "Certificate"
        return f"its certificate is not accepted: {tls[2]}" if is_known else f"it does not speak TLS (https): {tls[2]}"
    cause = _CAUSE.findall(text)
    return cause[-1] if cause else text.partition("\n\n")[0].replace("\n", "\\n")[:200]


def verdict(error: Exception, *, where: str, scheme: str, is_renewed: bool = False) -> Exception | None:
    """The error for a failed request; None if another try may succeed.

    Args:
        where: name of the file or the place in messages.
        scheme: of the store.
        is_renewed: whether the credentials were read anew, because others were refused.
    """
    status, said = status_of(error), reason(error)
    if is_renewed:
        said += ", also with credentials that were read anew"
    if "NoSuchUpload" in str(error):  # its last answer was lost, and it may be complete: put it once more
        return None
    problem: Exception | None = None
    if _NO_BUCKET.search(str(error)):
        problem = UsageError(
            f"{'/'.join(where.split('/')[:3])} does not exist: there is no such bucket",
            hint="check its name, AWS_ENDPOINT_URL and AWS_REGION" if scheme == "s3" else "check its name",
        )
    elif isinstance(error, FileNotFoundError) and status != 405:  # a server that does not know HEAD
        problem = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), where)
    elif _is_denied(error):
        problem = StoreError(f"{where}: access denied: {said}", hint=CREDENTIALS.get(scheme, _NO_CREDENTIALS))
    elif isinstance(error, NotSupportedError) or "non-partial response" in str(error):
        problem = StoreError(
            f"{where}: the server does not answer requests for ranges: {said}",
            hint="download the file, or take a server that answers them",
        )
    elif isinstance(error, NotImplementedError) or status in (405, 501, 505):
        hint = CONDITIONS if scheme in CREDENTIALS else "download the file"
        problem = StoreError(f"{where}: the store cannot do what was asked: {said}", hint=hint)
    elif isinstance(error, InvalidPathError | UnknownConfigurationKeyError | ValueError):
        problem = StoreError(
            f"{where}: {said}",
            hint="names may not have control characters, nor empty parts, '.' or '..' between their slashes",
        )
    elif status is not None and 300 <= status < 500 and status not in _TRY_AGAIN:
        address = f"do what its answer says, or check the address{' and AWS_REGION' if scheme == 's3' else ''}"
        hint = CREDENTIALS.get(scheme, address) if is_refusal(error) else address
        problem = StoreError(f"{where}: the store refused a request: {said}", hint=hint)
    return problem


def gave_up(error: Exception, *, where: str, scheme: str, tries: int, seconds: float) -> StoreError:
    """The error for a request that failed until the time was over."""
    if any(address in str(error) for address in _METADATA):
        return StoreError(
            f"{where}: no credentials were found: the metadata service of this machine does not answer "
            f"({reason(error)})",
            hint=CREDENTIALS.get(scheme, _NO_CREDENTIALS),
        )
    return StoreError(
        f"{where}: the store failed {counted(tries, 'time')} in {seconds:.0f} s, last with: {reason(error)}",
        hint="check the network and the address of the store, and run the same command again",
    )
