"""What a store answered in the place of an object, as one of the errors that ``protocols.Store`` promises."""

from __future__ import annotations

from fastpipe.core.text import printable
from fastpipe.errors import ObjectChangedError, StoreAccessError, StoreBusyError, StoreError

__all__ = ["changed", "missing", "refusal", "silence"]

_ACCESS_CODES = frozenset(
    (
        "AccessDenied", "AccountProblem", "AllAccessDisabled", "ExpiredToken", "InvalidAccessKeyId",
        "InvalidSecurity", "InvalidToken", "NotSignedUp", "RequestExpired", "RequestTimeTooSkewed",
        "SignatureDoesNotMatch", "TokenRefreshRequired",
    )
)  # fmt: skip
_BUSY_CODES = frozenset(
    ("SlowDown", "InternalError", "ServiceUnavailable", "RequestTimeout", "OperationAborted", "Throttling")
)
_ELSEWHERE_CODES = frozenset(
    ("AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "PermanentRedirect")
)
_BUSY = frozenset((408, 425, 429, 500, 502, 503, 504))
_REMEDY = (
    "Pass storage_options={'key': …, 'secret': …} ({'anon': True} for a public bucket), or set AWS_PROFILE, "
    "or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
)
_OTHER_REMEDY = "Pass storage_options=… with credentials, or let the environment have them"


def refusal(path: str, at: str, status: int, code: str = "") -> OSError:
    """The error for an answer of HTTP.

    Args:
        path: the object's, or what was listed.
        at: the store, in words.
        status: of the answer; 0 where it is not known.
        code: the store's own word for it, such as ``"NoSuchKey"``.
    """
    said = f"{status} {code}".strip() if status else code
    if status in (401, 403) or code in _ACCESS_CODES:
        remedy = _REMEDY if path.startswith("s3") else _OTHER_REMEDY
        return StoreAccessError(f"{path}: {at} does not let these credentials in ({said}). {remedy}")
    if status == 404 or code.startswith("NoSuch"):
        return missing(path, at, code)
    if status == 412:
        return changed(path, at)
    if status in _BUSY or code in _BUSY_CODES:
        return StoreBusyError(f"{path}: {at} is busy ({said})")
    if status in (301, 302, 307, 308) or code in _ELSEWHERE_CODES:
        return StoreError(
            f"{path}: {at} says that it is elsewhere ({said}). Pass the bucket's region, as "
            "storage_options={'client_kwargs': {'region_name': …}}, or its 'endpoint_url'"
        )
    return StoreError(f"{path}: {at} answered {said}")


def missing(path: str, at: str, code: str = "") -> FileNotFoundError:
    """The error for what is not there."""
    if code == "NoSuchBucket":
        return FileNotFoundError(
            printable(f"{path}: {at} has no such bucket. See to its name, and to the endpoint")
        )
    why = "it was removed, or the bucket or the endpoint is another one than it was"
    return FileNotFoundError(printable(f"{path} is not there, says {at}: {why}"))


def changed(path: str, at: str) -> ObjectChangedError:
    """The error for another version than was asked for."""
    remedy = "make the dataset anew, that of an image folder with refresh=True"
    return ObjectChangedError(f"{path} was replaced since it was listed, says {at}: {remedy}")


def silence(path: str, at: str, reason: str) -> StoreBusyError:
    """The error for no answer, or half of one."""
    return StoreBusyError(f"{path}: no whole answer of {at}: {reason}")
