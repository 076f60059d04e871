"""Clients of `obstore` for an address, with the same credentials as the store's own tools."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from obstore.store import AzureStore, GCSStore, HTTPStore, ObjectStore, S3Store

from tokshard.errors import StoreError, UsageError
from tokshard.store.addresses import Address

_BACKOFF = {"init_backoff": timedelta(seconds=0.2), "max_backoff": timedelta(seconds=2), "base": 2}

_SMALL: dict[str, Any] = {
    "retry_config": {"max_retries": 3, "retry_timeout": timedelta(seconds=10), "backoff": _BACKOFF},
    "client_options": {
        "connect_timeout": timedelta(seconds=5),
        "read_timeout": timedelta(seconds=5),  # a stall; by default it is noticed after 30 s
        "timeout": timedelta(seconds=60),  # a whole request, for those that trickle
    },
}
"""For requests that end soon. The few retries here are for blips; longer waiting is up to `Bucket`."""

_LARGE: dict[str, Any] = {
    # a part that is lost must not repeat the whole upload
    "retry_config": {"max_retries": 6, "retry_timeout": timedelta(minutes=10), "backoff": _BACKOFF},
    # without `read_timeout`, which would count while a part is still being sent
    "client_options": {"connect_timeout": timedelta(seconds=5), "timeout": timedelta(minutes=5)},
}
"""For large uploads."""

_S3_IDENTITIES = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)
"""Variables that `obstore` takes an identity from by itself."""


_S3_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")


_ASK_AGAIN = timedelta(minutes=6)
"""Credentials of a profile are asked for again from 5 minutes before this ends, so once a minute. AWS's own library
renews them 15 minutes before they expire, and costs nothing else."""


def open_provider(address: Address, *, is_large: bool) -> ObjectStore:
    """A client for a bucket or server, with the credentials that are there now. Sends nothing.

    Args:
        is_large: for uploads that take longer than a stall may.

    Raises:
        UsageError: the environment lacks what the store needs.
        StoreError: the credentials cannot be read.
    """
    options = copy.deepcopy(_LARGE if is_large else _SMALL)
    try:
        match address.scheme:
            case "s3":
                return _open_s3(address.host, options, os.environ)
            case "gs":
                return GCSStore(address.host, **options)
            case "az":
                return AzureStore(address.host, **options | _azure_settings(os.environ))
            case _:
                options["client_options"]["allow_http"] = address.scheme == "http"
                return HTTPStore.from_url(address.root, **options)
    except (StoreError, UsageError):
        raise
    except Exception as error:  # every provider has its own for a wrong configuration
        raise UsageError(
            f"{address.root} cannot be opened: {str(error).partition(chr(10))[0]}",
            hint="check the environment variables and the credentials of the store",
        ) from error


def _open_s3(bucket: str, options: dict[str, Any], environment: Mapping[str, str]) -> ObjectStore:
    settings: dict[str, Any] = {}
    is_anonymous = environment.get("AWS_SKIP_SIGNATURE", "").lower() in ("1", "true", "yes")
    if not is_anonymous and not any(environment.get(name) for name in _S3_IDENTITIES) and _has_profile(environment):
        settings = _profile_settings()
    for name in _S3_ENDPOINTS:
        if name in environment:
            _check_endpoint(name, environment[name])
    # the environment wins over a profile, as for the AWS tools; `obstore` prefers the profile
    if endpoint := next(filter(None, map(environment.get, _S3_ENDPOINTS)), None):
        settings["endpoint"] = endpoint
    if region := environment.get("AWS_REGION"):
        settings["region"] = region
    options["client_options"]["allow_http"] = settings.get("endpoint", "").startswith("http://")
    return S3Store(bucket, **settings, **options)


def _check_endpoint(name: str, value: str) -> None:
    """Refuse addresses that make `obstore` abort the process (empty, or without a scheme), and passwords."""
    if "@" in value or not value.startswith(("http://", "https://")) or not value.partition("://")[2]:
        raise UsageError(
            f"{name} is {value.rpartition('@')[2]!r}, expected a URL such as https://s3.example.com"
            + (" without a user name and password" if "@" in value else ""),
            hint="give it with its scheme, or unset it to reach Amazon's S3",
        )


def _has_profile(environment: Mapping[str, str]) -> bool:
    """Whether the AWS tools would find a profile: one is named, or there are their files."""
    if environment.get("AWS_PROFILE") or environment.get("AWS_DEFAULT_PROFILE"):
        return True
    credentials = environment.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials")
    config = environment.get("AWS_CONFIG_FILE", "~/.aws/config")
    return any(Path(path).expanduser().is_file() for path in (credentials, config))


def _profile_settings() -> dict[str, Any]:
    """Credentials, region and endpoint of the profile; AWS's own library knows SSO, roles and helper processes."""
    import boto3
    from botocore.exceptions import BotoCoreError
    from obstore.auth.boto3 import Boto3CredentialProvider

    try:
        session = boto3.Session()
        if session.get_credentials() is None:  # a profile without an identity: the role of the machine is left
            return {"region": session.region_name} if session.region_name else {}
        scoped = session._session.get_scoped_config()  # noqa: SLF001 -- boto3 gives the endpoint of a profile no other way
        settings: dict[str, Any] = {"credential_provider": Boto3CredentialProvider(session, ttl=_ASK_AGAIN)}
    except BotoCoreError as error:
        raise StoreError(
            f"the AWS profile cannot be used: {error}", hint="check AWS_PROFILE and ~/.aws, or run 'aws sso login'"
        ) from error
    if scoped.get("endpoint_url"):
        _check_endpoint("endpoint_url of the AWS profile", scoped["endpoint_url"])
        settings["endpoint"] = scoped["endpoint_url"]
    return settings


def _azure_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """The account, from the variables of the Azure command line as well, which `obstore` does not read."""
    settings = {}
    if account := environment.get("AZURE_STORAGE_ACCOUNT_NAME") or environment.get("AZURE_STORAGE_ACCOUNT"):
        settings["account_name"] = account
    if key := environment.get("AZURE_STORAGE_ACCOUNT_KEY") or environment.get("AZURE_STORAGE_KEY"):
        settings["account_key"] = key
    return settings
